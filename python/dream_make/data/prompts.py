"""Question phrasings for the demo target and its drafter: plain sentences that fit any picture.

``TRAIN`` may be used to train a target or a drafter. ``HELD_OUT`` is for evaluation alone and never enters training
of either; every
phrasing in it asks for two sentences or more. ``TASKS`` groups the phrasings of ``TRAIN`` by what they ask for;
``SHORT`` names the tasks whose
answers are a few words, so that a model trained on them answers briefly only when it is asked to.
"""

TASKS: dict[str, list[str]] = {
    "describe": [
        "Describe this picture.",
        "Describe the image.",
        "What can you see in this picture?",
        "What does this image show?",
        "Tell me about this picture.",
        "Please describe what is in the photo.",
        "Can you explain what this picture shows?",
        "What is going on in this picture?",
        "Describe the picture to someone who cannot see it.",
        "Explain what you see.",
    ],
    "two_sentences": [
        "Describe this picture in two sentences.",
        "Describe the image in three sentences.",
        "In two or three sentences, what is shown here?",
        "Give me a two-sentence description of this picture.",
        "Summarize the picture in two sentences.",
    ],
    "paragraph": [
        "Write a paragraph about this picture.",
        "Write a short paragraph describing the image.",
        "Describe the picture in detail.",
        "Give a detailed description of the image.",
        "Write a short essay about what you see in the picture.",
    ],
    "story": [
        "Write a short story about this picture.",
        "Tell me a story that fits this image.",
        "Write a bedtime story inspired by the picture.",
        "Make up a short adventure based on this picture.",
        "Write the beginning of a novel that starts with this scene.",
    ],
    "poem": [
        "Write a poem about this picture.",
        "Write a short rhyme about what you see.",
        "Compose four lines of poetry about the image.",
        "Write a cheerful poem inspired by this picture.",
    ],
    "facts": [
        "List three facts about the thing in this picture.",
        "Tell me something interesting about what is shown.",
        "What should I know about the thing in the picture?",
        "Give me some background about what you see.",
        "Explain the main subject of the picture to me.",
        "What is special about the thing in this image?",
    ],
    "email": [
        "Write an email to a friend about this picture.",
        "Write a short postcard text to go with this picture.",
        "Write a message to my family about this photo.",
        "Write a letter to a friend describing the picture.",
    ],
    "child": [
        "Explain this picture to a child.",
        "Describe the picture in simple words.",
        "How would you explain the image to a five-year-old?",
        "Tell a young student what this picture shows.",
    ],
    "list": [
        "List what you notice in this picture.",
        "Make a list of words that fit this picture and explain them.",
        "Give me three reasons to like this picture.",
        "List five things that go well with what is shown.",
        "Give me three tips about the thing in the picture.",
    ],
    "advert": [
        "Write an advertisement using this picture.",
        "Write a short product text for what is shown.",
        "Write a slogan and two sentences of advertising for this picture.",
        "Write a caption for a magazine and a short text below it.",
    ],
    "dialogue": [
        "Write a short dialogue between two people looking at this picture.",
        "Write a conversation between a teacher and a student about this image.",
        "Write a short scene for a play that uses this picture.",
        "Write an interview about what is shown in the picture.",
    ],
    "questions": [
        "What questions could I ask about this picture?",
        "Write three quiz questions about this picture.",
        "What would a curious child ask about this picture?",
        "Write a question about the picture and answer it.",
    ],
    "where": [
        "Where could this picture have been taken?",
        "Where would you find the thing in this picture?",
        "What is the thing in this picture used for?",
        "Why would somebody take this picture?",
        "Who might be interested in this picture, and why?",
        "What do people do with the thing shown here?",
    ],
    "colours": [
        "What colors do you see in this picture?",
        "Describe the colors and the mood of the picture.",
        "Describe what the main thing in the picture looks like.",
        "What does the background of this picture look like?",
    ],
    "creative": [
        "Write a title for this picture and explain it.",
        "Write a short news article about this picture.",
        "Write a diary entry inspired by this picture.",
        "Imagine you are in this picture. What do you see and feel?",
        "What might happen next in this picture?",
        "Write a social media post for this picture.",
        "Write a museum label for this picture.",
        "Write a riddle about the thing in this picture and give its solution.",
    ],
    "identify": [
        "What is the main subject of this picture? Explain how you can tell.",
        "What kind of thing is shown, and what is it like?",
        "Identify the object and describe it.",
        "What is this, and why is it important?",
        "What is this? Tell me more about it.",
    ],
    "name": [
        "What is in this picture? Answer with one or two words.",
        "Name the main object.",
        "Name the thing in the picture in a few words.",
        "What is this? Answer briefly.",
    ],
}

SHORT: frozenset[str] = frozenset({"name"})

TRAIN: list[str] = [phrasing for phrasings in TASKS.values() for phrasing in phrasings]

HELD_OUT: list[str] = [
    "Give me a description of the picture in four sentences.",
    "Please tell me in a few sentences what you are looking at.",
    "Write a short text for a travel guide that fits this picture.",
    "Write a newspaper headline and a short article about what is shown.",
    "How would you describe this image to your grandmother?",
    "Write a fairy tale that begins with this picture.",
    "Write a thank-you note that mentions what is in the picture.",
    "What would a scientist say about the thing in this picture? Answer in several sentences.",
    "Explain in three sentences why somebody might hang this picture on a wall.",
    "Write a short speech about this picture.",
    "Write a song verse and a chorus about the image.",
    "Pretend you are a tour guide and present this picture to visitors.",
    "What is the history of the thing shown here? Write a few sentences.",
    "Compare the thing in this picture with something similar, in three sentences.",
    "Write a review of this picture for a photography magazine.",
    "Write instructions for drawing this picture, step by step.",
    "What are the advantages and disadvantages of the thing in the picture?",
    "Write an entry for an encyclopedia about what you see.",
    "Write a phone conversation in which somebody describes this picture.",
    "Describe the most important details of this photo in a short text.",
    "Write a lesson plan for a class about the subject of the picture.",
    "Write a short blog post that begins with this photo.",
    "What could be just outside the frame of this picture? Explain in a few sentences.",
    "Tell me how this picture makes you feel and why, in at least three sentences.",
]
