"""Messages to a relay."""

from __future__ import annotations

import pytest

from megatron_stare.sync.delta.encoding import Damaged, Table, TensorEntry, packed, unpacked

ENTRIES = [
    TensorEntry("a.weight", "bfloat16", (2, 3), "b" * 64, "c" * 64, [("gaps", 5), ("same", 0)]),
    TensorEntry("b", "float32", (), "", "d" * 64, [("full", 4)]),
]
TABLE = Table("run-2", "run-1", 3, True, ENTRIES, {"config.json": "e30="})
BLOCKS = [b"12345", b"", b"6789"]


def test_a_message_survives_encoding() -> None:
    table, blocks = unpacked(packed(TABLE, BLOCKS))
    assert table.update == "run-2" and table.last and table.files == TABLE.files
    assert [entry.shape for entry in table.entries] == [(2, 3), ()]
    assert [entry.nbytes for entry in table.entries] == [12, 4]
    assert [[bytes(block) for block in of_entry] for of_entry in blocks] == [
        [b"12345", b""],
        [b"6789"],
    ]


def test_a_truncated_message_is_refused() -> None:
    whole = packed(TABLE, BLOCKS)
    for end in range(len(whole)):
        with pytest.raises(Damaged):
            unpacked(whole[:end])
    with pytest.raises(Damaged):
        unpacked(whole + b"0")


@pytest.mark.parametrize("changed", [b'"dtype":"int3"', b'"dtype":"float32","more":1'])
def test_a_tensor_of_an_unsupported_type_is_refused(changed: bytes) -> None:
    head, payload = packed(TABLE, BLOCKS)[8:-9], b"123456789"
    head = head.replace(b'"dtype":"float32"', changed)
    with pytest.raises(Damaged):
        unpacked(len(head).to_bytes(8, "little") + head + payload)
