"""How to reach inside a Hugging Face VLM without forking its modelling file."""
