"""What the compiler makes of the kernels, for GPUs that are not here: instructions, registers, spills; and where that
is kept, whoever the user is, and whatever cannot be read or written."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import ROUNDS, run_python

COMPILE = """
    import gc, json, os, random, re, subprocess, sys, tempfile
    os.environ.pop("NUMBA_ENABLE_CUDASIM", None)
    import torch
    from vmmkv.kernels import compiler, decode_mma, plain, row_append, row_copy, row_decode, row_prefill
    from vmmkv.kernels.appending import AppendVariant, Turning
    from vmmkv.kernels.arguments import Maps, Variant
    gc.disable()  # a tenth of the compiler's time
    bf16, family, ptxas, few = torch.bfloat16, *sys.argv[1:]
    DEVICES = (8, 0), (9, 0)

    def decode_kernel(variant):
        return row_decode.mma_kernel(variant, decode_mma.queries_of(variant, 8))

    if family == "decode":
        kernels = {
            f"decode, mma, {dim}, {q_len}, {general}": decode_kernel(
                Variant(bf16, dim, 4, q_len, general=general)
            )
            for dim, q_len, general in (
                (64, 2, True), (80, 1, False), (80, 8, True), (128, 1, False), (128, 2, True), (128, 4, True),
                (128, 8, True), (256, 1, False)
            )
        }
        eight_bits = Variant(bf16, 128, 4, 2, torch.float8_e4m3fn)
        for device in DEVICES:  # for others the instructions are the same, registers are not; to compile twice is slow
            kernels[f"decode, mma, 8 bits, {device}"] = decode_kernel(eight_bits)
    else:
        kernels = {
            "append": AppendVariant(128, 16, 128, 16),
            "append, quantizing": AppendVariant(64, 8, 80, 10, Turning(bf16, 32), (bf16, torch.int8)),
            "append, quantizing with scales": AppendVariant(
                64, 8, 64, 8, None, (bf16, torch.float8_e4m3fn), True
            ),
            "append, rotary, 128": AppendVariant(128, 16, 128, 16, Turning(bf16, 32)),
            "append, rotary, 256": AppendVariant(256, 64, 256, 64, Turning(torch.float32, 8)),
        }
        kernels = {name: row_append.append_kernel(variant) for name, variant in kernels.items()}
        kernels |= {
            "copy_tokens": row_copy.copy_kernel(80, 10),
            "plain": plain.plain_kernel(Variant(torch.float32, 128, 4, 1)),
        }
        for dim, general in ((64, True), (128, False), (128, True), (256, True)):
            variant = Variant(bf16, dim, 4, 0, general=general)
            kernels[f"prefill, mma, {dim}, {general}"] = row_prefill.mma_kernel(variant)
            variant = variant._replace(prefixes=dim == 64)
            kernels[f"prefill, wgmma, {dim}, {general}"] = row_prefill.wgmma_kernel(variant)
        variant = Variant(bf16, 128, 4, 0, torch.float8_e4m3fn, prefixes=True)
        kernels["prefill, mma, 128, 8 bits"] = row_prefill.mma_kernel(variant)
        for heads, q_len in ((16, 1), (64, 1), (16, 0)):
            variant = Variant(bf16, 576, heads, q_len)
            for device, shared_bytes in zip(DEVICES, (163 << 10, 227 << 10)):
                kernel = row_decode.latent_kernel("mma", variant, shared_bytes)
                kernels[f"latents, mma, {heads}, {q_len}, {device}"] = kernel
            if (heads, q_len) != (16, 1):
                kernels[f"latents, wgmma, {heads}, {q_len}"] = row_decode.latent_kernel("wgmma", variant, 0)
    kernels = dict(random.sample([*kernels.items()], min(len(kernels), int(few))))
    folder, facts = tempfile.mkdtemp(), []
    PACKED = {int: "u64", float: "f32", bytes: "b8"}

    def assemble(name, kernel, device, ptx):
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
            "taken": re.findall(r"^\\s*\\.param \\.(?:align 64 \\.)?(\\w+)", ptx, re.M),
            "given": [PACKED[kind] for kind in compiler.fields(kernel.structs)],
            "double": ".f64" in ptx,
            "wide": "v4.u32" in ptx or "cp.async" in ptx,
            "mma": "mma.sync.aligned.m16n8k16" in ptx,
            "wgmma": "wgmma.mma_async" in ptx,
            "maps": ("cp.async.bulk.tensor" in ptx) == (kernel.structs[0] is Maps),
        })

    def own_device(name):
        return next((device for device in DEVICES if name.endswith(f", {device}")), (9, 0))

    def instructions(ptx):
        return re.sub(r"\\.target \\w+|_cudapy_smem_\\d+|_ZN\\w+", "", ptx)

    for name, kernel in kernels.items():
        ptx = kernel.ptx(device := own_device(name))
        assemble(name, kernel, device, ptx)
        if not kernel.hopper and not name.endswith(")"):
            assemble(name, kernel, (8, 0), ptx.replace(".target sm_90", ".target sm_80"))
            if "decode" not in name and "128" not in name and "256" not in name:
                assert instructions(kernel.ptx((8, 0))) == instructions(ptx), name
    compiler.to_ptx = None  # from now on only the disk can help
    for name, kernel in kernels.items():
        assert kernel.ptx(own_device(name))
    print(json.dumps(facts))
"""

SPILL_BOUND = 256
"""Bytes of a thread that may go to local memory."""


def ptxas() -> str | None:
    """The assembler, of the package that the tests install or of the system."""
    packaged = [Path(folder) / "nvidia/cu13/bin/ptxas" for folder in sys.path]
    return next((str(path) for path in packaged if path.exists()), shutil.which("ptxas"))


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "few"), [("decode", 1), ("others", 1)])
def test_what_kernels_compile_to(family: str, few: int) -> None:
    """Parameters as they are packed, 16-byte accesses, tensor-core instructions, few spills, no double precision.

    Then they come from the disk. Each run compiles some, any of them, in a quarter of a minute; with enough rounds all.
    What this machine has compiled before comes from the disk at once.
    """
    assembler = ptxas()
    if assembler is None:
        pytest.skip("needs ptxas, of the package nvidia-cuda-nvcc")
    child = run_python(COMPILE, family, assembler, str(few * ROUNDS))
    assert child.stdout, child.stderr
    for fact in json.loads(child.stdout):
        name = fact["name"]
        assert fact["taken"] == fact["given"], name
        assert fact["wide"] or "quantizing" in name, name  # there a lane has four numbers
        assert not fact["double"], name
        assert not fact["complaints"], name
        assert fact["registers"] <= fact["most"], name
        assert fact["spilled"] <= SPILL_BOUND, name
        assert fact["mma"] == (", mma" in name), name
        assert fact["wgmma"] == ("wgmma" in name), name
        assert fact["maps"], name


COMPILES = """
    import os, sys
    from pathlib import Path

    def make_nothing():
        pass

    from vmmkv.kernels import compiler, folders
    compiles = []
    compiler.to_ptx = lambda *args: compiles.append(1) or "the kernel"
    kernel = compiler.Kernel(make_nothing, (), (), 32)
    kernel.ptx((8, 0))  # reads all that this user may read, and another may not
    compiles.clear()
    user = int(sys.argv[1])
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.environ.pop("XDG_CACHE_HOME")
    for _ in range(2):
        assert kernel.ptx((8, 0)) == "the kernel"
    print(len(compiles), folders.cache_folder())
"""
NOBODY = 54321


def compiled(cache: Path, user: int, **environment: str) -> tuple[int, Path]:
    """How often a process with next to no environment compiles a kernel that it needs twice, and where it is kept."""
    child = run_python(COMPILES, str(user), env={"XDG_CACHE_HOME": str(cache)} | environment)
    assert child.returncode == 0, child.stderr
    count, folder = child.stdout.split()
    return int(count), Path(folder)


@pytest.fixture
def all_can_enter() -> Iterator[Path]:
    """A folder that other users can enter, which they cannot where pytest has its own."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that is in no list")
def test_a_user_without_a_home_and_without_a_name(all_can_enter: Path) -> None:
    """Keeps them in a folder for temporary files that is the user's alone, also for the next process."""
    shared = all_can_enter / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / f"vmmkv-{NOBODY}-0").mkdir()  # another user's, of this name
    counts = []
    for _ in range(2):
        count, folder = compiled(all_can_enter / "cache", NOBODY, TMPDIR=str(shared))
        counts.append(count)
        assert folder.parent == shared
        assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (NOBODY, 0o700)
        assert len(list(folder.glob("*.ptx"))) == 1
    assert counts == [1, 0]
    assert not list((shared / f"vmmkv-{NOBODY}-0").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_cannot_be_read_is_done_without(tmp_path: Path) -> None:
    """Such as that of the user who started the process."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    assert compiled(tmp_path / "cache", NOBODY, HOME=str(home)) == (2, home / ".cache" / "vmmkv")
    assert not list(home.iterdir())


def test_a_home_is_used(tmp_path: Path) -> None:
    assert compiled(tmp_path / "cache", 0, HOME=str(tmp_path)) == (1, tmp_path / ".cache" / "vmmkv")
