"""Packages that a bare machine lacks, from wheels that lie beside this script; the standard library is enough here.

``results/h200/carried/wheels`` holds them, and git ignores the folder. On a machine without a package index they are
unpacked (a wheel is a zip file) and put first on the path, for this process and for those that it starts.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CARRIED = HERE / "carried"  # wheels/, and kept/: archives of earlier calls
PYTHON = (3, 12)  # of the machine for which wheels are carried
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
NEEDED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
OPTIONAL = {  # without which something is left out, and what
    "plotly": "the page of the report and its figures",
    "xdist": "GPU tests side by side",
}
ALSO = ("typing_extensions", "plotly")  # carried beside these: a version that fits them, and the page


def fits(wheel: Path) -> bool:
    """Says whether this interpreter can import a wheel, by the tags in its name."""
    tags = wheel.stem.split("-")[-3:]
    if len(tags) != 3:
        return False
    python, abi, platform = (tag.split(".") for tag in tags)
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if "none" in abi and "any" in platform:
        return any(tag in ("py3", own) for tag in python)
    here = os.uname()
    stable = "abi3" in abi and any(tag.startswith("cp3") for tag in python)
    return (own in python or stable) and any("linux" in tag and tag.endswith(here.machine) for tag in platform)


def modules(wheel: Path) -> set[str]:
    """Lists what can be imported from a wheel, by name at the top."""
    with zipfile.ZipFile(wheel) as file:
        tops = {name.split("/")[0] for name in file.namelist() if re.search(r"\.(py|so)$", name)}
    return {top.split(".")[0] for top in tops if not top.endswith((".dist-info", ".data"))}


def name_of(wheel: Path) -> str:
    return plain(wheel.name.split("-")[0])


def needs(wheel: Path) -> set[str]:
    """Lists the distributions that a wheel requires without any extra."""
    with zipfile.ZipFile(wheel) as file:
        found = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        text = file.read(found[0]).decode(errors="replace") if found else ""
    lines = re.findall(r"^Requires-Dist: (.*)$", text.partition("\n\n")[0], re.MULTILINE)
    return {plain(re.split(r"[\s;\[(<>=!~]", line, maxsplit=1)[0]) for line in lines if "extra ==" not in line}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def chosen(wheels: Iterable[Path]) -> list[Path]:
    """Picks the wheels of what is missing here, and what these need of the others, so that versions fit together."""
    usable = [wheel for wheel in wheels if fits(wheel)]
    picked = [wheel for wheel in usable if not all(map(is_there, modules(wheel)))]
    for wheel in picked:  # grows as it is walked
        wanted = needs(wheel)
        picked += [other for other in usable if other not in picked and name_of(other) in wanted]
    return picked


def provide(site: Path, wheels: Path) -> list[str]:
    """Unpacks into ``site`` what is missing here and carried, and puts it on the path; returns the names.

    A second call finds what the first has unpacked.
    """
    picked = chosen(sorted(wheels.glob("*.whl")))
    for wheel in picked:
        done = site / f".{wheel.name}"
        if not done.exists():
            site.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
            done.touch()
    if picked:
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        importlib.invalidate_caches()
    return [wheel.name for wheel in picked]


def lacking(names: Iterable[str] = NEEDED) -> list[str]:
    return [name for name in names if not is_there(name)]


def left_out() -> list[str]:
    """Says what does without a package that is optional and missing."""
    return [f"without {name}: {what} are left out" for name, what in OPTIONAL.items() if not is_there(name)]


def pinned(names: Sequence[str], constraints: Path) -> list[str]:
    """Lists NAME==VERSION as the project's own environment has them."""
    versions = dict(line.split("==") for line in constraints.read_text().splitlines() if "==" in line)
    by_name = {plain(name): f"{name}=={version}" for name, version in versions.items()}
    return [by_name[name] for name in names]


def download(wheels: Path) -> int:
    """Fetches the wheels with pip, on a machine that may; returns pip's exit code."""
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()  # one version of each
    version = ".".join(map(str, PYTHON))
    where = [word for platform in PLATFORMS for word in ("--platform", platform)]
    own = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", version, *where]
    what = pinned((*NEEDED, *ALSO), HERE.parents[1] / "constraints.txt")
    command = [sys.executable, "-m", "pip", "download", *own, "--dest", str(wheels), *what]
    return subprocess.run(command, check=False).returncode
