"""A server on rows, and a client of it; the model is a tiny Llama, and its tokens are words."""

import tempfile
import time

import openai
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import vmmkv
from vmmkv.integrations.serving import serve

folder = tempfile.TemporaryDirectory()
words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(100)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder.name)  # type: ignore[no-untyped-call]
config = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None
)
LlamaForCausalLM(config).save_pretrained(folder.name)

# As `vmmkv serve`, but in a thread, on a port that is free.
options = ["--device", "cpu", "--host", "127.0.0.1", "--port", "0", "--non-blocking"]
server = serve([folder.name, *options], max_bytes="64MiB")
try:
    while not server.server.started:
        time.sleep(0.01)
    port = server.server.servers[0].sockets[0].getsockname()[1]

    # --8<-- [start:client]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    answer = client.completions.create(model=folder.name, prompt="w3 w5 w7", max_tokens=8, temperature=0)
    print(answer.choices[0].text)

    with client.completions.create(
        model=folder.name, prompt="w3 w5 w7", max_tokens=1000, temperature=0, stream=True
    ) as stream:
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
            break  # the request ends, and gives its memory back
    # --8<-- [end:client]
    print()

    # --8<-- [start:refused]
    try:
        client.completions.create(model=folder.name, prompt="w3 w5 w7 " * 1000)
    except openai.BadRequestError as error:
        print(error)  # a row is as long as `--max-seq-len`
    else:
        raise AssertionError("the prompt fits a row")
    # --8<-- [end:refused]
    client.close()
finally:
    server.kill_server()  # type: ignore[no-untyped-call]
    vmmkv.publication.unpublish()
    folder.cleanup()
