"""The other side of `generate.py`: transformers' generate, one round per line of input."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

folder, new = sys.argv[1], int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
inputs = torch.tensor(json.loads(sys.stdin.readline()))
options = {
    "do_sample": False,
    "use_cache": True,
    "pad_token_id": 0,
    "attention_mask": torch.ones_like(inputs),
}
with torch.no_grad():
    model.generate(inputs, max_new_tokens=8, **options)
    print("{}", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        out = model.generate(inputs, max_new_tokens=new, **options)
        seconds = time.perf_counter() - begin
        print(
            json.dumps({"seconds": seconds, "tokens": out[:, inputs.shape[1] :].tolist()}),
            flush=True,
        )
