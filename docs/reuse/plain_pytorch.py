"""GRPO on dapo-math in plain PyTorch: sample groups, grade, take one policy-gradient step. On-policy: no clipping."""

import sys

import torch
from dapo_math import grade
from dapo_math.trl import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
MODEL = "trainer/assets/tiny"  # any causal language model with a chat template
PROMPTS, SAMPLES, MAX_NEW_TOKENS, LEARNING_RATE = 16, 8, 16, 3e-4

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
data = load_dataset("arithmetic", prompt_style="plain", arithmetic={"low": 0, "high": 49})

for step in range(STEPS):
    # One row a sample; rows of one problem are neighbours: B = PROMPTS * SAMPLES.
    rows = [data[(step * PROMPTS + p) % len(data)] for p in range(PROMPTS) for _ in range(SAMPLES)]
    texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows]
    prompt = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    width = prompt.input_ids.shape[1]

    model.eval()
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        ids_BT = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, **sampling)
    response_BR = ids_BT[:, width:]
    # A response is trained up to and with its end token; what follows is padding.
    ended_BR = (response_BR == tokenizer.eos_token_id).cumsum(1)
    mask_BR = ((ended_BR - (response_BR == tokenizer.eos_token_id).long()) == 0).float()

    replies = tokenizer.batch_decode(response_BR, skip_special_tokens=True)
    grades = [
        grade(reply, row["answer"], problem=row["prompt"][-1]["content"])
        for reply, row in zip(replies, rows, strict=True)
    ]
    reward_PS = torch.tensor([g.reward for g in grades]).view(PROMPTS, SAMPLES)
    advantage_B = ((reward_PS - reward_PS.mean(1, keepdim=True)) / (reward_PS.std(1, keepdim=True) + 1e-6)).view(-1)

    model.train()
    attention_BT = torch.cat([prompt.attention_mask, mask_BR.long()], 1)
    position_BT = (attention_BT.cumsum(1) - 1).clamp(min=0)
    logits_BRV = model(ids_BT, attention_mask=attention_BT, position_ids=position_BT).logits[:, width - 1 : -1]
    logprob_BR = torch.log_softmax(logits_BRV, -1).gather(2, response_BR[..., None])[..., 0]
    loss = -(advantage_B[:, None] * logprob_BR * mask_BR).sum() / mask_BR.sum()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    print(f"step {step + 1}  reward {reward_PS.mean():.3f}  loss {loss.item():+.4f}  gradient {norm:.3f}", flush=True)
