"""Sampling with the same seed, plainly and with the drafter, gives the same text (fp32)."""

import torch

from dream_ext import attach, demo
from dream_ext.loading import build_inputs, load_picture

target = demo.load_target(dtype=torch.float32)
drafter = demo.load_drafter(dtype=torch.float32)
processor = demo.load_processor()
picture = load_picture(demo.pictures()[0])
inputs = build_inputs(processor, "Write a short poem about this picture.", picture, torch.device("cpu"), torch.float32)
options = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.8}

torch.manual_seed(7)
plain = target.generate(**inputs, **options)
with attach(target, drafter):
    torch.manual_seed(7)
    ours = target.generate(**inputs, **options)

print(processor.decode(ours[0], skip_special_tokens=True))
print("same text:", "yes" if torch.equal(plain, ours) else "no")
