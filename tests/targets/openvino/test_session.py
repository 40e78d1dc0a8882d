"""An engine that was loaded before is read from the cache, and is the engine that was compiled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from compressor.targets import BuildOptions
from compressor.targets.openvino import session
from compressor.targets.openvino.engine import OpenVinoEngine, build_engine, load_engine
from compressor.targets.openvino.session import Layer
from tests.quick_cases import quick
from tests.targets.graphs import Pruned, pruned

SHAPES = ((1, 16), (2, 32))


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


@pytest.fixture(scope="module")
def built(bert: Pruned, tmp_path_factory: pytest.TempPathFactory) -> OpenVinoEngine:
    return build_engine(
        bert.shrunk, tmp_path_factory.mktemp("bert") / "engine.xml", threads=1, options=BuildOptions(shapes=SHAPES)
    )


def blobs(cache: Path) -> dict[Path, int]:
    """The compiled models in a cache, with the time of writing."""
    return {path: path.stat().st_mtime_ns for path in cache.glob("*/*.blob")}


def require_equal(loaded: OpenVinoEngine, built: OpenVinoEngine, bert: Pruned) -> None:
    """Check that two engines are the same; OpenVINO numbers the nodes that it adds."""
    named = [
        [sorted(name for name in layer.nodes if name.startswith("node_")) for layer in engine.layers]
        for engine in (loaded, built)
    ]
    assert named[0] == named[1]
    assert (loaded.fused, loaded.attentions, loaded.kernels) == (built.fused, built.attentions, built.kernels)
    for name, expected in built.run(bert.inputs).items():
        np.testing.assert_array_equal(loaded.run(bert.inputs)[name], expected)


def test_an_engine_from_the_cache_is_the_one_that_was_built(built: OpenVinoEngine, bert: Pruned, cache: Path) -> None:
    require_equal(load_engine(built.path, threads=1), built, bert)
    written = blobs(cache)
    assert len(written) == 1 + len(SHAPES)
    require_equal(load_engine(built.path, threads=1), built, bert)
    assert blobs(cache) == written
    load_engine(built.path, threads=2)
    assert len(blobs(cache)) == 2 * (1 + len(SHAPES)), "another number of threads is another engine"


@pytest.mark.zoo
def test_building_and_measuring_memory_do_not_use_the_cache(bert: Pruned, tmp_path: Path, cache: Path) -> None:
    engine = build_engine(bert.shrunk, tmp_path / "engine.xml", threads=1)
    assert engine.memory(bert.inputs) is not None
    assert not cache.exists()


@pytest.mark.parametrize("damage", quick(["truncated", "other version", "other instruction set"], ["truncated"]))
def test_a_compiled_model_that_does_not_fit_is_compiled_anew(
    damage: str, built: OpenVinoEngine, bert: Pruned, cache: Path
) -> None:
    load_engine(built.path, threads=1)
    written = blobs(cache)
    for path in written:
        content = path.read_bytes()
        version, isa = session.openvino.__version__.partition("-")[0].encode(), b"isa="
        assert version in content
        assert isa in content
        changed = {
            "truncated": content[: len(content) // 2],
            "other version": content.replace(version, b"2020.1.1"[: len(version)]),
            "other instruction set": content.replace(isa, b"isa=Z")[: len(content)],
        }
        path.chmod(0o600)
        path.write_bytes(changed[damage])
        os.utime(path, ns=(1, 1))
    require_equal(load_engine(built.path, threads=1), built, bert)
    assert all(time != 1 for time in blobs(cache).values())


@pytest.mark.zoo
def test_layers_are_read_again_where_they_are_missing(built: OpenVinoEngine, bert: Pruned, cache: Path) -> None:
    load_engine(built.path, threads=1)
    (layers,) = cache.glob("*/layers.json")
    for content in ("", "[1]", '[{"kind": "MVN"}]'):
        layers.write_text(content)
        require_equal(load_engine(built.path, threads=1), built, bert)


def test_an_engine_loads_without_a_cache_that_can_be_written(built: OpenVinoEngine, bert: Pruned, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    require_equal(load_engine(built.path, threads=1), built, bert)


def test_layers_are_stored(tmp_path: Path) -> None:
    layers = (Layer("MVN", "f32", frozenset({"b", "a"})), Layer("Subgraph", "i8", frozenset()))
    session.write_layers(tmp_path, layers)
    assert session.read_layers(tmp_path) == layers
    assert session.read_layers(tmp_path / "missing") is None


def test_models_of_former_weights_are_removed(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    for number in range(4):
        blob = tmp_path / "engine" / f"{number}.blob"
        blob.write_bytes(bytes(100))
        os.utime(blob, (number, number))
    session.evict_oldest(tmp_path, total=250)
    assert sorted(file.name for file in (tmp_path / "engine").iterdir()) == ["2.blob", "3.blob"]


def test_engines_that_were_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.blob").write_bytes(bytes(100))
        os.utime(folder, (number, number))

    def left() -> list[str]:
        return sorted(folder.name for folder in tmp_path.iterdir())

    session.evict_oldest(tmp_path, engines=4)
    assert left() == ["1", "2", "3", "4"]
    session.evict_oldest(tmp_path, total=250)
    assert left() == ["3", "4"]
    session.evict_oldest(tmp_path, total=1)
    assert left() == ["4"], "the engine that was just used stays"
    shutil.rmtree(tmp_path / "4")
    session.evict_oldest(tmp_path)
