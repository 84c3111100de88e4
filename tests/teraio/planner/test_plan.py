"""Plan files, and the order of moves."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraio.errors import PlanFormatError
from teraio.planner.plan import Move, MoveKind, Plan, Prediction, sort_moves

counts = st.integers(0, 2**60)
moves = st.builds(
    lambda kind, storage, nbytes, trigger, lasting, why: Move(kind, storage, nbytes, trigger, trigger + lasting, why),
    st.sampled_from(MoveKind), counts, counts, counts, counts, st.text(),
)  # fmt: skip
plans = st.builds(
    Plan,
    policy=st.text(),
    signature=st.text(),
    budget_nbytes=counts,
    moves=st.lists(moves, max_size=5).map(tuple),
    predicted=st.builds(Prediction, st.floats(0, 1e9), st.floats(0, 1e9), counts, counts, counts),
)


@pytest.fixture
def plan():
    return Plan(
        "planned",
        "abc",
        1000,
        (Move(MoveKind.OFFLOAD, 0, 100, 1, 2, "relieves the peak"), Move(MoveKind.RELOAD, 0, 100, 3, 4)),
        Prediction(1.25, 0.5, 900, 100, 100),
    )


@pytest.fixture
def content(plan, tmp_path):
    """What a saved plan holds, to be damaged."""
    plan.save(tmp_path / "whole.json")
    return json.loads((tmp_path / "whole.json").read_text())


@pytest.fixture
def load(tmp_path):
    """Load a plan from a file with the given content."""

    def load(content):
        path = tmp_path / "plan.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return Plan.load(path)

    return load


class TestFile:
    @given(plan=plans)
    def test_round_trip(self, plan, tmp_path_factory):
        path = tmp_path_factory.getbasetemp() / "round-trip.json"
        plan.save(path)
        assert Plan.load(path) == plan

    def test_leaves_nothing_beside_it(self, plan, tmp_path):
        plan.save(tmp_path / "plan.json")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]

    def test_is_text_to_compare(self, plan, tmp_path):
        """One sorted line for each fact and each move: one changed move is one changed line."""
        other = dataclasses.replace(plan, moves=(dataclasses.replace(plan.moves[0], deadline=3), plan.moves[1]))
        plan.save(tmp_path / "a.json")
        other.save(tmp_path / "b.json")
        a, b = ((tmp_path / name).read_text().splitlines() for name in ("a.json", "b.json"))
        assert len(a) == len(b)
        assert [(x, y) for x, y in zip(a, b, strict=True) if x != y] == [
            (
                '    {"deadline": 2, "kind": "offload", "nbytes": 100, "storage": 0, "trigger": 1, '
                '"why": "relieves the peak"},',
                '    {"deadline": 3, "kind": "offload", "nbytes": 100, "storage": 0, "trigger": 1, '
                '"why": "relieves the peak"},',
            )
        ]

    def test_header_is_sorted(self, content):
        header = [key for key in content if key != "moves"]
        assert header == sorted(header)

    def test_without_moves(self, plan, tmp_path):
        empty = dataclasses.replace(plan, moves=())
        empty.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == empty

    def test_missing_file_is_an_os_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            Plan.load(tmp_path / "nowhere.json")


class TestRejected:
    @pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000, "[]", "null", '"teraio-plan"'])
    def test_foreign_text(self, load, text):
        with pytest.raises(PlanFormatError, match=r"plan\.json"):
            load(text)

    def test_foreign_bytes(self, tmp_path):
        (tmp_path / "plan.json").write_bytes(b"\x80\x02\xff")
        with pytest.raises(PlanFormatError, match="not a plan file"):
            Plan.load(tmp_path / "plan.json")

    def test_foreign_format(self, load, content):
        with pytest.raises(PlanFormatError, match="not a plan written by teraio"):
            load(content | {"format": "something-else"})

    @pytest.mark.parametrize("version", [2, 0, "1", None])
    def test_other_version(self, load, content, version):
        with pytest.raises(PlanFormatError, match="version"):
            load(content | {"version": version})

    @pytest.mark.parametrize("key", ["policy", "signature", "budget_nbytes", "moves", "predicted"])
    def test_missing_fact(self, load, content, key):
        del content[key]
        with pytest.raises(PlanFormatError, match=key):
            load(content)

    @pytest.mark.parametrize("key", ["kind", "storage", "nbytes", "trigger", "deadline", "why"])
    def test_missing_fact_of_a_move(self, load, content, key):
        del content["moves"][0][key]
        with pytest.raises(PlanFormatError, match=key):
            load(content)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("kind", "teleport"), ("storage", -1), ("nbytes", 1.5), ("nbytes", True), ("trigger", "1"),
            ("deadline", None), ("deadline", 0), ("why", 7),
        ],
    )  # fmt: skip
    def test_damaged_move(self, load, content, key, value):
        content["moves"][0][key] = value
        with pytest.raises(PlanFormatError, match="does not hold together"):
            load(content)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("policy", 3), ("signature", None), ("budget_nbytes", -1), ("moves", "none"), ("moves", [1]),
            ("predicted", []), ("predicted", {"step_s": "fast"}),
        ],
    )  # fmt: skip
    def test_damaged_fact(self, load, content, key, value):
        with pytest.raises(PlanFormatError, match="does not hold together"):
            load(content | {key: value})

    @pytest.mark.parametrize(
        ("key", "value"), [("step_s", "1"), ("step_s", -1), ("stall_s", float("nan")), ("peak_nbytes", 0.5)]
    )
    def test_damaged_prediction(self, load, content, key, value):
        content["predicted"][key] = value
        with pytest.raises(PlanFormatError, match="does not hold together"):
            load(content)

    def test_truncated_anywhere(self, load, content):
        text = json.dumps(content)
        for length in range(len(text)):
            with pytest.raises(PlanFormatError):
                load(text[:length])


def test_moves_are_sorted_by_trigger_and_memory_is_given_back_first():
    reload, drop, offload = (Move(kind, 0, 1, 5, 6) for kind in (MoveKind.RELOAD, MoveKind.DROP, MoveKind.OFFLOAD))
    early = Move(MoveKind.RELOAD, 9, 1, 4, 9)
    assert sort_moves([reload, offload, drop, early]) == (early, drop, offload, reload)


def test_offloaded_nbytes_counts_writes(plan):
    assert plan.offloaded_nbytes == 100
