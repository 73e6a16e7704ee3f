"""Whatever is handed in ends in one sentence of bounded length and exit code 2 or 4, never in an internal error."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from stabilitylab import cli
from stabilitylab.config import Config, DataConfig, parse_set, read_config_file, resolve, validated
from stabilitylab.data import load_data
from stabilitylab.errors import InputError, UsageError, bounded
from stabilitylab.inputs import expression, shown
from stabilitylab.models import ARCHS, arch
from stabilitylab.models.archs.postln import PostLN
from stabilitylab.models.base import ArchOptions, options_of, stack_archs

LONGEST = 1600
EXAMPLES = int(os.environ.get("EXAMPLES", "200"))  # values a setting, in the slow set
SECTIONS = {name: type(getattr(Config(), name)) for name in ("model", "data", "train", "probes")}
KEYS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
ODD = [
    *(
        "",
        "true",
        "false",
        "[]",
        "{}",
        "nan",
        "inf",
        "-inf",
        "1e308",
        "1e400",
        "-1",
        "0",
        "0.5",
        "²",
        "١٢",
        "0x10",
        "1_0",
    ),
    *(
        "9" * 5000,
        "-" + "9" * 5000,
        "0x" + "F" * 5000,
        "1" + "0" * 400,
        "[" * 2000,
        "{a=" * 500,
        "'" * 9,
        '"',
        "\\",
        "\n",
        "\r",
        "a\nb = 3",
    ),
    *(
        "1979-05-27",
        "'x'",
        "[1, 'a']",
        "[[1]]",
        "log",
        "None",
        "null",
        "\x1b[31m",
        "\u202e",
        "x" * 100_000,
        "a,b",
        "../..",
    ),
]
VALUES = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=60),
    st.integers().map(str),
    st.floats().map(repr),
    st.recursive(
        st.one_of(st.booleans().map(lambda b: str(b).lower()), st.integers().map(str), st.floats().map(repr)),
        lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        max_leaves=6,
    ),
)


def one_sentence(text: str) -> bool:
    return "\n" not in text.strip() and len(text) <= LONGEST


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck])
@given(value=VALUES)
def test_every_setting_against_many_values(key: str, value: str) -> None:
    check(key, value)


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_against_odd_values(key: str) -> None:
    for value in ODD:
        check(key, value)


@pytest.mark.parametrize(
    "key", ["arch.T", "arch.growth", "arch.t0", "arch.kappa", "arch." + "x" * 5000, "arch.\x1b[31m"]
)
def test_every_option_of_an_architecture_against_odd_values(key: str) -> None:
    """Its own, its aliases of the ramp beside the ramp, and what it has not."""
    with ARCHS.restored():

        @arch("bent")
        class Bent(PostLN):
            """x_{l+1} = LN(x_l + F(x_l)).  Mine."""

            class Options(ArchOptions):
                kappa: float = Field(default=1.0, gt=0)

        for value in ODD:
            for more in ([], ["model.T=7"]):
                found = tried(lambda value=value, more=more: parse_set([f"{key}={value}", "model.arch=bent", *more]))
                if isinstance(found, Config):
                    try:
                        options_of(stack_archs(found.model)["encoder"], found.model)
                    except UsageError as error:
                        found = str(error)
                assert isinstance(found, Config) or one_sentence(found), found


def check(key: str, value: str) -> None:
    found = tried(lambda: parse_set([f"{key}={value}"]))
    if isinstance(found, Config):
        assert validated(found.model_dump(mode="json")) == found
    else:
        assert one_sentence(found), found
        assert found.endswith(".")


def tried(document: Callable[[], dict[str, Any]]) -> Config | str:
    """The configuration, or why there is none."""
    try:
        return resolve(document(), depth=2)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.lr=true", "setting train.lr = True: Input should not be true or false"),
        ("train.lr=1e308", "setting train.lr = 1e+308: Input should be less than or equal to 1000"),
        ("train.steps=" + "9" * 5000, "setting train.steps = '9999"),
        ("probes.every=true", "probes.every"),
        ("model.T=false", "model.T = False"),
        ("train.lr=1\nx = 2", "setting train.lr = '1\\nx = 2'"),
    ],
)
def test_what_is_refused_and_how(assignment: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(parse_set([assignment]), depth=2)
    assert words in str(error.value)


LONG = st.integers(0, 9).map(lambda digit: 10**4500 + digit)  # hypothesis prints what it draws from
TOML = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(),
        st.text(max_size=9),
        st.floats(),
        st.just("x" * 9999),
        LONG,
        st.none(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["preset", "model", "data", "train", "probes", "x" * 3000]),
        st.one_of(
            TOML,
            st.dictionaries(st.sampled_from(["arch", "lr", "stack", "names", "every", "T", "encoder_layers"]), TOML),
        ),
        max_size=3,
    )
)
def test_every_shape_of_a_configuration(document: dict[str, Any]) -> None:
    found = tried(lambda: document)
    assert isinstance(found, Config) or one_sentence(found)


@pytest.mark.parametrize(
    "content",
    [
        b"[train\n",
        b"a = " + b"[" * 100_000,
        b"a = " + b"9" * 5000,
        b"arch = 0x" + b"F" * 5000,
        b"arch = [[0x" + b"F" * 5000 + b"]]",
        b"model = 0x" + b"F" * 5000,
        b"\xff\xfe",
        b"preset = []",
        b"preset = 3",
        b"model = 'gpt2'",
        b"[model]\narch = 7",
        b"[model]\narch = []",
        b"[model]\nstack = []",
        b"[train]\nlr = [1]",
        b"[train]\nlr = 1979-05-27",
        b"\0",
        b"x = '" + b"y" * 2_000_000 + b"'",
    ],
)
def test_every_configuration_file_ends_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises((InputError, UsageError)) as error:
        resolve(read_config_file(path), depth=2)
    assert one_sentence(str(error.value))


@pytest.fixture
def odd_files(tmp_path: Path) -> dict[str, Path]:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    return {
        "pipe": tmp_path / "fifo",
        "device": Path("/dev/zero"),
        "directory": tmp_path / "folder",
        "name": Path("a\0b"),
        "missing": tmp_path / ("x" * 300),
    }


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "name", "missing"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind: str, odd_files: dict[str, Path], tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("a b\n" * 200)
    for source in (f"text:{odd_files[kind]},{good}", f"text:{good},{odd_files[kind]}"):
        with pytest.raises(InputError) as error:
            load_data(DataConfig(source=source), stack="encoder-decoder")
        assert one_sentence(str(error.value))
    with pytest.raises(InputError) as error:
        read_config_file(odd_files[kind])
    assert one_sentence(str(error.value))
    from stabilitylab.sweep.identity import content

    if kind != "directory":
        with pytest.raises(InputError):
            content(odd_files[kind])


def corpus(source: Path, target: Path, **limits: int) -> None:
    load_data(DataConfig(source=f"text:{source},{target}", **limits), stack="encoder-decoder")


def test_a_file_that_unpacks_to_gigabytes_is_refused_within_bounded_memory(tmp_path: Path) -> None:
    """2.9 MB of gzip that would be 3 GB, within 60 MB beyond what the process has."""
    bomb, good = tmp_path / "bomb.gz", tmp_path / "good"
    bomb.write_bytes(gzip.compress(bytes(10_000_000)) * 300)  # a gzip file may have many members
    good.write_text("a b\n" * 200)
    with pytest.raises(
        InputError, match=r"bomb\.gz unpacks to more than 50 MB.*--set data\.max_file_mb raises"
    ) as error:
        corpus(bomb, good, max_file_mb=50)
    assert one_sentence(str(error.value))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="unpacks to more than 20 MB"):
        corpus(bomb, good, max_file_mb=20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB
    large = tmp_path / "large"
    large.write_bytes(b"a b\n" * 300_000)
    with pytest.raises(InputError, match="large holds more than 1 MB"):
        corpus(large, good, max_file_mb=1)


def test_a_line_without_an_end_and_lines_ended_by_carriage_returns(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("a b\n" * 200)
    endless = tmp_path / "endless"
    endless.write_bytes(b"a b\n" * 3 + b"x" * 3_000_000 + b"\n" + b"a b\n" * 196)
    with pytest.raises(InputError, match=r"line 4 of .*endless has 3,000,000 bytes.*data\.max_line_kb raises"):
        corpus(endless, good)
    mac = tmp_path / "mac"
    mac.write_bytes(b"a b\r" * 200)
    with pytest.raises(InputError, match="carriage returns alone: convert it"):
        corpus(mac, good)
    good.write_text("".join(f"a{i} b{i * 7}\n" for i in range(200)))
    corpus(good, good, max_line_kb=1, max_file_mb=1)


# every flag of every command


def options() -> Iterator[tuple[str, str]]:
    group: Any = typer.main.get_command(cli.build())
    for command, definition in sorted(group.commands.items()):
        for parameter in definition.params:
            if parameter.param_type_name == "option" and not parameter.is_flag and parameter.name != "help":
                yield command, parameter.opts[0]


NASTY = [
    "²",
    "9" * 5000,
    "-1",
    "nan",
    "[" * 3000,
    "a\nb",
    "../../x",
    "",
    "\x1b[31m",
    "x" * 5000,
    "a,b,,c",
    "0..",
    "1e308",
]
FIRST = {  # what a command needs before its options, so that nothing is trained
    "probe": ["--dry-run", "--depth", "2", "--steps", "1"],
    "sweep": ["--print", "--grid", "arch=postln"],
    "check": ["nothing:here"],
    "evaluate": ["nowhere"],
    "diagnose": ["nowhere"],
    "compare": ["nowhere", "nowhere"],
    "export": ["nowhere", "--to", "csv"],
    "verify": ["nowhere"],
    "list": ["presets"],
    "onestep": ["--depth", "1"],  # odd, and so refused
    "lr-find": ["--depth", "1"],
}


@pytest.mark.parametrize("text", ["[", "a{99999999999}", "(" * 5000])
def test_text_that_is_no_regular_expression_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--place .* is no regular expression \(.*\): give another\.$") as caught:
        expression(text, "--place", "another")
    assert len(str(caught.value)) < LONGEST


def test_a_bracket_in_a_set_is_read_without_a_warning() -> None:
    assert expression("[[ffn]", "--place", "another").fullmatch("[")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option"), [*options()], ids=lambda value: value)
def test_every_flag_against_odd_values(command: str, option: str, run) -> None:
    for value in NASTY:
        code, _, err = run(command, *FIRST.get(command, ["nowhere"]), option, value)
        assert code in (0, 2, 4, 5), (value[:20], code, err[:300])
        assert "internal error" not in err
        if code:
            assert len(err) <= LONGEST + 200, (value[:20], err[:300])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["probe", "--every", "²"], 2),
        (["probe", "--every", "9" * 5000], 2),
        (["probe", "--set", "train.lr=true"], 2),
        (["probe", "--name", "../../pwned"], 2),
        (["probe", "--name", "x" * 300], 2),
        (["probe", "--config", "/dev/zero"], 4),
        (["runs", "x" * 5000], 4),
        (["verify", "x" * 5000], 4),
        (["sweep", "--grid", "seed=0.." + "9" * 5000, "--print"], 2),
        (["sweep", "--grid", "train.lr=" + "9" * 5000, "--print"], 2),
        (["probe", "--out", "a\0b"], 2),
    ],
)
def test_flags_that_were_internal_errors(arguments: list[str], code: int, run, tmp_path: Path) -> None:
    found, _, err = run(*arguments)
    assert found == code, err
    assert err.startswith("stabilitylab: ")
    assert one_sentence(err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_fifo_is_not_waited_for_by_the_command_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for arguments in (["probe", "--data", "text:fifo,fifo"], ["probe", "--config", "fifo"]):
        command = [sys.executable, "-m", "stabilitylab", *arguments]
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=path)
        assert (done.returncode, "fifo (Is a pipe): give a file" in done.stderr) == (4, True), done.stderr


def test_what_is_shown_is_bounded() -> None:
    assert shown(10**5000) == "a int too long to be shown"
    assert len(shown("x" * 10_000)) < 120
    assert bounded("a\nb  c") == "a b c"
    assert len(bounded("x" * 10_000)) <= 1500
