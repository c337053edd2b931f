"""Prefix reuse: a chat that goes on in its own row, and a system prompt that many prompts have in common."""

import numpy as np
import torch

import vmmkv

# --8<-- [start:cache]
layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
cache = vmmkv.KVCache(layout, max_sequences=64, max_seq_len=131_072, max_bytes="256MiB")
# --8<-- [end:cache]

tokenizer = np.random.default_rng(0)
true = torch.randn(50_000, 8, 64)  # K and V of a model in which they depend on the token alone


def tokenize(count: int) -> np.ndarray:
    return tokenizer.integers(len(true), size=count)


def compute(sequence: vmmkv.Sequence, ids: np.ndarray) -> None:
    """A model's part: K and V of the tokens that these ids are, at the end of the sequence."""
    states = true[torch.from_numpy(ids)].to(cache.device)
    for layer in range(4):
        sequence.write(layer, states, states)


def is_right(sequence: vmmkv.Sequence, ids: np.ndarray) -> bool:
    return torch.equal(sequence.k(3).cpu(), true[torch.from_numpy(ids)])


# --8<-- [start:first]
ids = tokenize(1000)  # what the user says
chat = cache.sequence(token_ids=ids)  # room for all of it
assert chat.cached_tokens == 0  # no sequence has begun like this
compute(chat, ids)
for _ in range(50):  # what the model says
    token = tokenize(1)
    chat.extend(1)
    compute(chat, token)
    ids = np.append(ids, token)
chat.commit(ids)  # known from now on
row = chat.row
chat.free()
# --8<-- [end:first]

# --8<-- [start:next]
ids = np.append(ids, tokenize(200))  # the user says more
calls = cache.stats().driver_calls
chat = cache.sequence(token_ids=ids)
assert (chat.row, chat.cached_tokens) == (row, 1050)  # where it ended, to the token
compute(chat, ids[chat.cached_tokens :])
chat.commit(ids)
# --8<-- [end:next]
assert is_right(chat, ids)
mapped = {name: call.count - calls[name].count for name, call in cache.stats().driver_calls.items()}
assert mapped["map"] == 1, mapped  # 1,250 tokens lie in 10 pages, 1,050 in 9
chat.free()

# --8<-- [start:system]
system = tokenize(2100)  # 16 pages and 52 tokens
first = cache.sequence(token_ids=system)
compute(first, system)
first.commit(system, retention=[vmmkv.Retention(priority=90)])

pages = cache.stats().pages["used"]
questions = [np.append(system, tokenize(30)) for _ in range(8)]
users = [cache.sequence(token_ids=question) for question in questions]
for user, question in zip(users, questions):
    compute(user, question[user.cached_tokens :])
    user.commit(question)
    assert user.cached_tokens == 2100  # the pages that it fills are shared, the other 52 tokens are copied
assert cache.stats().pages["used"] == pages + 8
# --8<-- [end:system]
assert all(is_right(user, question) for user, question in zip(users, questions))
cache.free([first, *users])

again = np.append(questions[0][:2000], tokenize(100))  # goes another way within a page
with cache.sequence(token_ids=again) as branch:
    assert branch.cached_tokens == 2000  # a copy of what the page holds up to there
    compute(branch, again[2000:])
    assert is_right(branch, again)

# --8<-- [start:retention]
document = tokenize(4096)
with cache.sequence(token_ids=document) as reader:
    compute(reader, document)
    reader.commit(
        document,
        retention=[
            vmmkv.Retention(0, 2048, priority=80, seconds=600),  # needed again in the next minutes
            vmmkv.Retention(2048, None, priority=10),  # goes first
        ],
    )
# --8<-- [end:retention]

config = vmmkv.RetentionConfig(
    (vmmkv.Retention(0, 100, priority=80),),  # of the prompt; the rest of it has 35
    decode_priority=10,  # what is generated goes first
    decode_seconds=60,
)
question, answer = tokenize(200), tokenize(100)
with cache.sequence(token_ids=question) as asked:
    compute(asked, question)
    asked.extend(len(answer))
    compute(asked, answer)
    asked.commit(np.append(question, answer), retention=config.of_sequence(len(question)))

stats = cache.stats()
print(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} tokens were there")
print(f"{stats.prefix_pages} pages are known, {stats.pages['surplus']} are surplus, and can be had by others")
cache.trim()  # gives surplus back
assert cache.stats().prefix_pages == 0
cache.check()
cache.close()
