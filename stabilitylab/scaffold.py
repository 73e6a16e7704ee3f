"""The files that somebody begins a probe with: the probe, its test, and in this repository its place in the docs."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Mapping
from pathlib import Path

from .errors import InputError, UsageError

PROBE = '''\
"""The probe ``{name}``."""

from __future__ import annotations

{imports}


# on: "forward" or "backward" in each probed row, "reference" in evaluation mode on the fixed batch.
# at: layers, norms, activations, attentions, stream, outputs or logits, or a function of yours that returns Sites.
@probe("{name}", on="forward", at=layers, unit="units of y", columns={{"value": Mean()}})
class {title}(Probe):
    """max_d |y_d| of each layer's output y, mean over real tokens."""

    def measure(self, site, x, y, weight):
        return y.abs().amax(dim=-1)  # one number per token; padding is left out for you
'''

TEST = '''\
"""The probe ``{name}`` is its formula, written once more in numpy, over real tokens alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import stabilitylab as sl{after}


def test_{name}_is_its_formula(tmp_path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    tokens = torch.randn(2, 5, 8, dtype=torch.float64)
    real = torch.arange(5) < torch.tensor([[5], [3]])
    outputs = []
    for each in model.layers:
        each.register_forward_hook(lambda module, given, y: outputs.append(y.detach().numpy()))

    with sl.watch(model, out=tmp_path / "run", probes="{name}", every=1, mask=real) as w:
        loss = model(tokens).square().mean()
        loss.backward()
        w.step(loss=loss)

    expected = [np.abs(y[real.numpy()]).max(axis=-1).mean() for y in outputs[:3]]
    found = sl.Run.open(tmp_path / "run").frame("{name}")
    assert list(found["layer"]) == [1, 2, 3]
    np.testing.assert_allclose(found["value"], expected, rtol=1e-12)
'''

DOCS = """
## {name}

```{{probe}} {name}
```
"""

LIBRARY, TESTS, PAGE = Path("stabilitylab/probes/library"), Path("tests/probes"), Path("docs/probes/training.md")


def new_probe(name: str, folder: Path) -> list[Path]:
    """Write a probe that runs and its test, and return their paths.

    ``folder`` may be a checkout of this repository: then the probe stands in its library, and ``docs/probes`` names it.
    Anywhere else it is a module for ``--plugin``. Raises UsageError for a name that a module or a probe cannot have,
    InputError for a file that exists (then nothing is written) or that cannot be written.
    """
    if not name.isidentifier() or not name.islower() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is no name of a probe: use lower-case letters, digits and _, such as 'gate_share'.")
    inside = (folder / LIBRARY).is_dir()
    if not inside and name in sys.stdlib_module_names:
        raise UsageError(f"{name}.py would hide Python's module {name!r}: choose another name.")
    files = _in_the_library(name) if inside else _beside_each_other(name)
    for path in files:
        if (folder / path).exists():
            raise InputError(f"{folder / path} exists: choose another name, or remove it.")
    page = folder / PAGE
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        if inside:
            page.write_text(page.read_text(encoding="utf-8") + DOCS.format(name=name), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written: {error.strerror}.") from error
    return [folder / path for path in files] + ([page] if inside else [])


def _in_the_library(name: str) -> Mapping[Path, str]:
    imports = "from ..base import Probe, probe\nfrom ..places.sites import layers\nfrom ..rules import Mean"
    test = TEST.format(name=name, after="")
    return {LIBRARY / f"{name}.py": _probe(name, imports), TESTS / f"test_probes_{name}.py": test}


def _beside_each_other(name: str) -> Mapping[Path, str]:
    imports = "from stabilitylab.probes import Mean, Probe, probe\nfrom stabilitylab.probes.places import layers"
    test = TEST.format(name=name, after=f"\n\nimport {name}  # noqa: F401 (registers the probe)")
    return {Path(f"{name}.py"): _probe(name, imports), Path(f"test_{name}.py"): test}


def _probe(name: str, imports: str) -> str:
    return PROBE.format(name=name, imports=imports, title="".join(part.capitalize() for part in name.split("_")))
