"""Puts machine code into a wheel (see vmmkv/compiled/code.py), and README.md beside it; pyproject.toml has the rest."""

import re
import runpy
import subprocess
import sys
import tomllib
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


def readme() -> str:
    """README.md with links that work on a page of its own: to files of the repository, and to its pictures."""
    repository = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{repository}/raw/main/", Path("README.md").read_text())
    return re.sub(rf"(?<!!)(\[[^\]]*\]\()(?!\w+:|{repository})", rf"\1{repository}/blob/main/", text)


setup(
    cmdclass={"build_py": BuildWithMachineCode},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
