"""Compiles a library with Numba and writes its bitcode: `python -P make.py LIBRARY FOLDER`.

It needs Numba and numpy alone: the package around the library is not imported, and torch with it.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = [*(f"vmmkv.{name}.entries" for name in ("driver", "core", "prefix")), "vmmkv.torch.allocating"]
"""All that there are."""
PROCESSORS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
"""LLVM's names of those that there is bitcode for. It differs in this and in how data lie."""


def main(library: str, folder: Path) -> None:
    """Writes a file for each processor."""
    os.environ["VMMKV_MAKING_CODE"] = "1"
    root, *inside, _ = library.split(".")
    folder_of, name = Path(__file__).parent.parent, root
    for part in ["", *inside]:
        folder_of, name = folder_of / part, f"{name}.{part}" if part else name
        sys.modules[name] = ModuleType(name)  # in the place of a package, whose __init__ would import all of it
        sys.modules[name].__path__ = [str(folder_of)]
    module = import_module(library)
    digest = import_module("vmmkv.compiled.code").digest(module.SOURCES)
    for processor, bitcode in compile_for_all(module.ENTRIES).items():
        path = folder / f"{library}-{digest}-{processor}.bc"
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(bitcode)
        unfinished.replace(path)


def compile_for_all(entries: list[Any]) -> dict[str, bytes]:
    """Bitcode of entries by processor. An entry's symbol is its name behind `vmmkv_`."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    texts = [text_of(each) for each in entries]
    found = {}
    for processor, triple in PROCESSORS.items():
        machine = llvm.Target.from_triple(triple).create_target_machine(opt=2)
        linked, *others = (llvm.parse_assembly(text) for text in texts)
        for module in (linked, *others):
            module.triple, module.data_layout = triple, str(machine.target_data)
        for module in others:
            linked.link_in(module)
        for function in linked.functions:
            if not function.is_declaration and not function.name.startswith("vmmkv_"):
                function.linkage = "internal"
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(linked, builder)
        linked.verify()
        check(linked)
        found[processor] = linked.as_bitcode()
    return found


def text_of(dispatcher: Any) -> str:
    """LLVM's text of one entry, with all that it calls.

    Numba's functions return a status, and their result through a pointer. A status other than 0 is an exception, of
    which compiled functions have none: the process stops there.
    """
    signature = import_module("vmmkv.compiled").signature_of(dispatcher.py_func)
    if signature.args not in dispatcher.overloads:  # another entry may call this one
        dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature.args]
    words = [f"i64 %a{index}" for index in range(len(signature.args))]
    return f"""{compiled.library.get_llvm_str()}
declare void @llvm.trap()
define i64 @vmmkv_{dispatcher.py_func.__name__}({", ".join(words)}) {{
  %result = alloca i64
  %error = alloca ptr
  %status = call i32 @{compiled.fndesc.llvm_func_name}({", ".join(["ptr %result", "ptr %error", *words])})
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %stop, label %done
stop:
  call void @llvm.trap()
  unreachable
done:
  %value = load i64, ptr %result
  ret i64 %value
}}
"""


def check(module: Any) -> None:
    """Raises `ValueError` where code needs what is not there when it is loaded: Numba's runtime, or Python's."""
    declared = [function.name for function in module.functions if function.is_declaration]
    missing = [name for name in declared if name.startswith(("numba", "NRT", "Py", "llvm.x86"))]
    if missing:
        raise ValueError(f"compiled code calls {missing}: a function there allocates, or raises")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
