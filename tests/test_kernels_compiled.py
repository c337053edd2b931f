"""What the compiler makes of the kernels, for GPUs that are not here: instructions, registers, spills; and the disk."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import run_python

COMPILE = """
    import json, os, re, subprocess, sys, tempfile
    os.environ.pop("NUMBA_ENABLE_CUDASIM", None)
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    import torch
    from vmmkv.kernels import compiler, plain, row_append, row_copy, row_decode, row_prefill
    bf16, ptxas = torch.bfloat16, sys.argv[1]
    kernels = {
        "append": row_append.append_kernel(128, 16, 128, 16, True, 0, False),
        "append, behind": row_append.append_kernel(128, 16, 128, 16, False, 0, True),
        "append, paged": row_append.append_kernel(128, 16, 128, 16, True, 16, False),
        "copy_tokens": row_copy.copy_kernel(80, 10),
        "plain": plain.plain_kernel(torch.float32, 128, 4, 1, 0, True, True, True),
    }
    for dim in 64, 128, 256:
        for paged in (0, 16) if dim < 256 else (0,):
            name = f"{dim}, paged" if paged else f"{dim}"
            kernels[f"decode, mma, {name}"] = row_decode.mma_kernel(bf16, dim, 4, 1, paged, False, False)
            kernels[f"prefill, mma, {name}"] = row_prefill.mma_kernel(bf16, dim, 4, paged, True, False, False)
            kernels[f"prefill, wgmma, {name}"] = row_prefill.wgmma_kernel(bf16, dim, 4, paged, True, False, False)
    folder, facts = tempfile.mkdtemp(), []
    for name, kernel in kernels.items():
        for device in [(9, 0)] if kernel.hopper else [(8, 0), (9, 0)]:
            ptx = kernel.ptx(device)
            assert ptx == kernel.ptx(device)
            path = os.path.join(folder, "kernel.ptx")
            open(path, "w").write(ptx)
            target = "sm_" + "".join(map(str, device)) + "a" * kernel.hopper
            command = [ptxas, "-v", f"-arch={target}", path, "-o", path + ".cubin"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            facts.append({
                "name": name,
                "most": 65536 // (kernel.threads * kernel.blocks_per_sm) // 8 * 8,
                "registers": int(re.search(r"Used (\\d+) registers", log)[1]),
                "spilled": int(re.search(r"(\\d+) bytes spill stores", log)[1]),
                "complaints": re.findall(r"Potential Performance Loss.*", log),
                "double": ".f64" in ptx,
                "wide": "v4.u32" in ptx or "cp.async" in ptx,
                "mma": "mma.sync.aligned.m16n8k16" in ptx,
                "wgmma": "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx,
            })
    compiler.to_ptx = None  # from now on only the disk can help
    for kernel in kernels.values():
        kernel.ptx((9, 0))
    print(json.dumps(facts))
"""

SPILL_BOUND = 256
"""Bytes of a thread that may go to local memory."""


def ptxas() -> str | None:
    """The assembler, of the package that the tests install or of the system."""
    packaged = [Path(folder) / "nvidia/cu13/bin/ptxas" for folder in sys.path]
    return next((str(path) for path in packaged if path.exists()), shutil.which("ptxas"))


def test_what_kernels_compile_to() -> None:
    """16-byte accesses, tensor-core instructions, few spills, no double precision; then they come from the disk."""
    assembler = ptxas()
    if assembler is None:
        pytest.skip("needs ptxas, of the package nvidia-cuda-nvcc")
    child = run_python(COMPILE, assembler)
    assert child.stdout, child.stderr
    for fact in json.loads(child.stdout):
        name = fact["name"]
        assert fact["wide"], name
        assert not fact["double"], name
        assert not fact["complaints"], name
        assert fact["registers"] <= fact["most"], name
        assert fact["spilled"] <= SPILL_BOUND, name
        assert fact["mma"] == (", mma" in name), name
        assert fact["wgmma"] == ("wgmma" in name), name
