"""Puts machine code into a wheel (see vmmkv/compiled/code.py); all else is in pyproject.toml."""

import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithMachineCode(build_py):
    """Compiles the libraries of the package. An editable install does that when they are first used."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        script, folder = Path("vmmkv/compiled/make.py"), Path(self.build_lib, "vmmkv/compiled/machine_code")
        folder.mkdir(parents=True, exist_ok=True)
        for library in runpy.run_path(str(script))["LIBRARIES"]:
            subprocess.run([sys.executable, "-P", str(script), library, str(folder)], check=True)


setup(cmdclass={"build_py": BuildWithMachineCode})
