"""Answer a question about a picture with the demo model: python examples/answer.py [PICTURE [QUESTION]]"""

import sys

import torch
from transformers import TextStreamer

from dream_ext import Decoder, demo
from dream_ext.loading import build_inputs, load_picture

picture = load_picture(sys.argv[1] if len(sys.argv) > 1 else demo.pictures()[0])
question = sys.argv[2] if len(sys.argv) > 2 else "Describe this picture in two sentences."

processor = demo.load_processor()
inputs = build_inputs(processor, question, picture, torch.device("cpu"), torch.bfloat16)
decoder = Decoder(demo.load_target(dtype=torch.bfloat16), demo.load_drafter(dtype=torch.bfloat16))
streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
decoder.generate(**inputs, max_new_tokens=96, streamer=streamer)
print(f"{decoder.stats.tau:.2f} tokens per target forward, {decoder.stats.tokens_per_s:.1f} tokens/s")
