"""The text of calls with sparse tensors: what is written is read again, and anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_wis.sparse import (
    OPERATORS,
    Dense,
    DenseResult,
    Layout,
    Named,
    Number,
    Sparse,
    SparseCall,
    SparseFacts,
    SparseTextError,
    Written,
    parse_results,
    results_text,
)

POSITIONS = st.integers(0, 9)
SIZES = st.lists(st.integers(0, 99), max_size=4).map(tuple)
COO = st.builds(Sparse, st.just(Layout.COO), SIZES, st.tuples(POSITIONS), POSITIONS, st.booleans())
CSR = st.builds(Sparse, st.just(Layout.CSR), SIZES, st.tuples(POSITIONS, POSITIONS), POSITIONS, st.just(False))
SIMPLE = st.one_of(
    st.builds(Dense, POSITIONS), st.builds(Number, POSITIONS, st.sampled_from(["", "f32"])), st.just(Written()),
    st.builds(Named, st.sampled_from(["dtype", "layout"]), st.text(max_size=5)),
    st.none(), st.booleans(), st.integers(-9, 9), st.floats(-9, 9), st.text(max_size=5),
)  # fmt: skip
ARGUMENTS = st.one_of(SIMPLE, COO, CSR, st.lists(SIMPLE, max_size=3).map(tuple))


@given(st.sampled_from(sorted(OPERATORS)), st.lists(ARGUMENTS, max_size=4), st.lists(st.tuples(st.text(), ARGUMENTS)))
def test_call_after_text_and_back_is_the_same(operator, args, kwargs):
    call = SparseCall(operator, tuple(args), tuple(kwargs))
    assert SparseCall.parse(call.text()) == call


def test_results_and_facts_after_text_and_back_are_the_same():
    results = [DenseResult((2, 3), (3, 1), "f32"), DenseResult((), (), "i64")]
    assert parse_results(results_text(results)) == results
    facts = SparseFacts(Layout.BSR, (4, 6), 2, False)
    assert SparseFacts.of_shape(facts.shape()) == facts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x" * 20000, "at most 16384"),
        ("[", "not JSON"),
        ("[" * 5000, "not JSON"),
        ("{}", "must be"),
        ('["aten.system.default",[],[]]', "not one of the operators"),
        ('["aten.mm.default",[["dense",-1]],[]]', "not a position"),
        ('["aten.mm.default",[["dense",true]],[]]', "not a position"),
        ('["aten.mm.default",[["list",["list"]]],[]]', "malformed"),
        ('["aten.mm.default",[["sparse","sparse_coo",[3],[0,1],2,true]],[]]', "2 index tensors"),
        ('["aten.mm.default",[["sparse","dense",[3],[0],2,true]],[]]', "not a sparse layout"),
        ('["aten.mm.default",[["sparse","sparse_coo",[9223372036854775807,9],[0],2,true]],[]]', "elements"),
        ('["aten.mm.default",[],[["x"]]]', "named argument"),
    ],
)
def test_malformed_text_of_call_is_refused_with_reason(text, reason):
    with pytest.raises(SparseTextError, match=reason):
        SparseCall.parse(text)
