"""Test the DataProto of ROLL, rows of tensors and objects, and its functions."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(find_spec("tensordict") is None, reason="needs tensordict")

from helmsman.compat.roll_data import (  # noqa: E402
    DataProto,
    custom_np_concatenate,
    pad_dataproto_to_divisor,
    reduce_metrics,
    unpad_dataproto,
)


def make(num: int = 4, **meta: Any) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(2 * num).view(num, 2), "score": torch.arange(float(num))},
        {"text": [f"t{n % 2}" for n in range(num)]},
        meta,
    )


def test_data_proto_rows() -> None:
    data = make(step=3)
    assert len(data) == 4
    assert data.batch["ids"].shape == (4, 2)
    assert data.non_tensor_batch["text"].dtype == object
    assert data.meta_info == {"step": 3}
    assert len(DataProto()) == 0
    assert DataProto(non_tensor_batch={"x": np.arange(3)}).batch is None
    with pytest.raises(ValueError, match="equal numbers of rows"):
        DataProto({"x": torch.zeros(2)}, {"y": np.zeros(3)})


def test_data_proto_getitem() -> None:
    data = make()
    assert data["score"].tolist() == [0.0, 1.0, 2.0, 3.0]
    for item, expected in (
        (1, [1.0]),
        (-1, [3.0]),
        (np.int64(2), [2.0]),
        (slice(1, 3), [1.0, 2.0]),
        ([3, 0], [3.0, 0.0]),
        (np.array([2]), [2.0]),
        (torch.tensor([True, False, False, True]), [0.0, 3.0]),
    ):
        rows = data[item]
        assert rows["score"].tolist() == expected
        assert len(rows) == len(expected) == len(rows.non_tensor_batch["text"])


def test_data_proto_select_and_pop() -> None:
    data = make(step=3)
    chosen = data.select(["ids"], [], [])
    assert [*chosen.rows.columns] == ["ids"] and chosen.meta_info == {}
    popped = data.pop("score", "text", ["step"])
    assert [*popped.rows.columns] == ["score", "text"] and popped.meta_info == {"step": 3}
    assert [*data.rows.columns] == ["ids"] and data.meta_info == {}
    with pytest.raises(KeyError, match="absent"):
        data.pop(["ids", "absent"])
    assert "ids" in data.batch.keys()  # noqa: SIM118 - a TensorDict has rows


def test_data_proto_changes_in_place() -> None:
    data = make()
    assert data.rename("score", "reward") is data
    data.reorder(torch.tensor([3, 2, 1, 0]))
    assert data.union(DataProto.from_single_dict({"more": torch.ones(4)})) is data
    assert data["reward"].tolist() == [3.0, 2.0, 1.0, 0.0]
    assert data.to("cpu")["more"].sum() == 4
    copied = data.clone()
    copied.batch["more"].zero_()
    assert data["more"].sum() == 4
    with pytest.raises(ValueError, match="more"):
        data.union(DataProto.from_single_dict({"more": torch.zeros(4)}))


def test_data_proto_repeat_and_chunk() -> None:
    data = make(3)
    assert data.repeat(2)["score"].tolist() == [0, 0, 1, 1, 2, 2]
    assert data.repeat(2, interleave=False)["score"].tolist() == [0, 1, 2, 0, 1, 2]
    assert [len(part) for part in data.chunk(2)] == [2, 1]


def test_data_proto_group_by() -> None:
    groups = make().group_by("text")
    assert {name: rows["score"].tolist() for name, rows in groups.items()} == {
        "t0": [0.0, 2.0],
        "t1": [1.0, 3.0],
    }
    assert [*make().group_by(["text", "score"])] == ["t0|0.0", "t1|1.0", "t0|2.0", "t1|3.0"]
    with pytest.raises(KeyError, match="no column 'absent'; there are ids, score, text"):
        make().group_by("absent")


def test_data_proto_concat() -> None:
    parts = [
        make(2, metrics={"loss": 1.0, "own": [4]}, step=1, times=[1]),
        make(1, metrics={"loss": [2.0, 3.0]}, step=2, times=2),
    ]
    joined = DataProto.concat(parts, global_keys={"times"})
    assert joined["score"].tolist() == [0.0, 1.0, 0.0]
    assert joined.meta_info == {
        "step": 1,
        "metrics": {"loss": [1.0, 2.0, 3.0], "own": [4]},
        "times": [1, 2],
    }


def test_pad_dataproto() -> None:
    padded, num = pad_dataproto_to_divisor(make(3, step=1), 4)
    assert (len(padded), num, padded.meta_info) == (4, 1, {"step": 1})
    assert padded["score"].tolist() == [0.0, 1.0, 2.0, 2.0]
    assert unpad_dataproto(padded, num)["score"].tolist() == [0.0, 1.0, 2.0]
    assert unpad_dataproto(make(2), 0)["score"].tolist() == [0.0, 1.0]


def test_custom_np_concatenate_shapes() -> None:
    assert custom_np_concatenate([np.zeros((2, 3)), np.ones((1, 3))]).shape == (3, 3)
    joined = custom_np_concatenate([np.zeros((2, 3)), np.ones((1, 2))])
    assert joined.dtype == object and [row.shape for row in joined] == [(3,), (3,), (2,)]


def test_reduce_metrics() -> None:
    values = [1.0, 2.0, 6.0]
    names = ("plain", "loss@max", "loss_sum", "time@p50")
    reduced = reduce_metrics({**dict.fromkeys(names, values), "number": 5, "none": []}, np.min)
    assert reduced == {
        "plain": 1.0,
        "loss@max": 6.0,
        "loss_sum": 9.0,
        "time@p50": 2.0,
        "number": 5,
        "none": [],
    }
