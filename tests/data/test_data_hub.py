"""Data sets of the hub's library, read from disk; and what happens without the library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from invented_text import invented

from stabilitylab.config import DataConfig
from stabilitylab.data import Dataset, load_data
from stabilitylab.errors import InputError, ResourceError

SOURCE, TARGET = invented(200)


def load(spec: str, **settings) -> Dataset:
    config = DataConfig(source=f"hf:{spec}", vocab_size=300, held_out=48, **settings)
    return load_data(config, stack="encoder-decoder")


def held_out_text(data: Dataset) -> list[str]:
    return [data.decode(row.tolist()) for row in data.held_out.labels]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = pytest.importorskip("datasets", reason='needs pip install "stabilitylab[datasets]"')
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    return library


def test_nested_translation_columns_of_a_saved_data_set(datasets, tmp_path: Path) -> None:
    nested = [{"xx": a, "yy": b} for a, b in zip(SOURCE, TARGET, strict=True)]
    datasets.Dataset.from_dict({"translation": nested}).save_to_disk(str(tmp_path / "saved"))
    data = load(f"{tmp_path / 'saved'},translation.xx,translation.yy")
    assert data.joint
    assert data.describe()["pairs"] == 200
    assert set(held_out_text(data)) <= set(TARGET)


def test_splits_and_plain_columns_of_a_saved_data_set(datasets, tmp_path: Path) -> None:
    splits = {
        name: datasets.Dataset.from_dict({"de.x": SOURCE[part], "en": TARGET[part]})
        for name, part in {"train": slice(0, 150), "validation": slice(150, 200)}.items()
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    data = load(f"{tmp_path / 'saved'},de.x,en", valid="validation")
    assert held_out_text(data) == TARGET[150:198]
    assert data.describe()["train"] == 150
    with pytest.raises(InputError, match=r"no split 'test'; it has train, validation\.$"):
        load(f"{tmp_path / 'saved'},de.x,en", valid="test")


def test_a_folder_of_json_lines(datasets, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    rows = [json.dumps({"xx": a, "yy": b}) for a, b in zip(SOURCE, TARGET, strict=True)]
    (tmp_path / "corpus" / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = load(f"{tmp_path / 'corpus'},xx,yy")
    assert data.describe()["pairs"] == 200
    assert set(held_out_text(data)) <= set(TARGET)


def test_the_same_text_gives_the_same_data_as_from_files(datasets, tmp_path: Path, write_pair) -> None:
    paths = write_pair(SOURCE, TARGET)
    files = load_data(
        DataConfig(source=f"text:{paths[0]},{paths[1]}", vocab_size=300, held_out=48), stack="encoder-decoder"
    )
    datasets.Dataset.from_dict({"xx": SOURCE, "yy": TARGET}).save_to_disk(str(tmp_path / "saved"))
    hub = load(f"{tmp_path / 'saved'},xx,yy")
    for key in ("train_sha256", "held_out_sha256", "tokenizer_sha256"):
        assert files.describe()[key] == hub.describe()[key]


def test_a_column_that_is_absent_nested_elsewhere_or_not_text(datasets, tmp_path: Path) -> None:
    rows = {"xx": SOURCE, "yy": [*TARGET[:7], None, *TARGET[8:]], "t": [{"yy": b} for b in TARGET]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=r"has no column 'zz'; it has xx, yy, t\.$"):
        load(f"{tmp_path / 'saved'},xx,zz")
    with pytest.raises(InputError, match=r"column 't' .* has no field 'zz' in every row\.$"):
        load(f"{tmp_path / 'saved'},xx,t.zz")
    with pytest.raises(InputError, match=r"row 7 of column 'yy' .* is not text but NoneType\.$"):
        load(f"{tmp_path / 'saved'},xx,yy")
    with pytest.raises(InputError, match=r"row 0 of column 't' .* is not text but dict\.$"):
        load(f"{tmp_path / 'saved'},xx,t")


def test_a_folder_that_holds_no_data_set(datasets, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="cannot load the data set") as caught:
        load(f"{tmp_path / 'nothing'},xx,yy")
    assert "\n" not in str(caught.value)


def test_a_name_goes_to_the_hub_with_its_configuration(datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, configuration: str | None = None):
        asked.append((path, configuration))
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"xx": SOURCE, "yy": TARGET})})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load("some/corpus:de-en,xx,yy")
    load("some/corpus,xx,yy")
    assert asked == [("some/corpus", "de-en"), ("some/corpus", None)]


def test_an_unreachable_hub_is_one_sentence(datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, configuration: str | None = None):
        raise ConnectionError(f"Couldn't reach {path}\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"cannot load the data set 'some/corpus': Couldn't reach some/corpus\.$"):
        load("some/corpus,xx,yy")


def test_without_the_extra_package_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ResourceError, match=r'pip install "stabilitylab\[datasets\]"'):
        load("some/corpus,xx,yy")
