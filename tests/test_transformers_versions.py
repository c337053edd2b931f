"""A few tests with the newest transformers that is known here, in a process of their own. `make test` installs it."""

from __future__ import annotations

from textwrap import dedent

import pytest
import transformers
from conftest import ROOT, run_python

from vmmkv.integrations.batching import TESTED

NEWEST = ROOT / ".venv" / "transformers-newest"
TESTS = [
    *(
        f"test_continuous_batching.py::test_all_kinds_of_models_give_the_tokens_of_generate[{name}]"
        for name in ("llama-gqa", "gemma3", "gemma4", "gpt-neox", "gpt-oss", "mixtral")
    ),
    "test_model_config.py::test_a_layout_has_the_bytes_by_which_a_cache_grows_or_is_refused",
    "test_continuous_batching.py::test_several_answers_to_one_prompt[llama-gqa]",
    "test_continuous_batching.py::test_a_name_may_be_used_again_while_a_batch_is_ahead",
    "test_serving.py::test_64_clients_get_the_text_of_generate_and_leave_nothing",
    "test_transformers.py::test_greedy[cpu-gemma3-vmmkv]",
    "test_docs.py::test_example_runs[transformers_cache]",
    "test_docs.py::test_the_readmes_examples_run",
]


def test_the_newest_version_gives_the_same_tokens() -> None:
    """In batches, made ahead as well, behind the server, and with a `VmmCache`; and layouts are those of its caches."""
    if not NEWEST.is_dir():
        pytest.skip(f"there is no transformers {TESTED[-1]} in {NEWEST.relative_to(ROOT)}")
    code = """
        import transformers
        import pytest
        print(transformers.__version__, flush=True)
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
    """
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    child = run_python(f"sys.path[:0] = {[str(NEWEST), str(ROOT)]!r}\n" + dedent(code), *tests)
    assert child.returncode == 0, child.stdout + child.stderr
    version = child.stdout.split()[0]
    assert version.startswith(f"{TESTED[-1]}.")
    assert version != transformers.__version__
