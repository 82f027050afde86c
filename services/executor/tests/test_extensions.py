"""Extension libraries of an executor: what is offered, which laws hold, and what is refused."""

import sys

import pytest
import torch
from wooly_executor.bounds.extensions import RULES, UNKNOWN, of_extension
from wooly_executor.bounds.work import Given
from wooly_executor.errors import OperationError
from wooly_executor.runtime import extensions
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.fresh_memory import writes_all
from wooly_executor.runtime.guards import EXTENSION_LAWS, LAWS, law_of
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, View

SCHEMAS = (
    "plain(Tensor x, float by) -> Tensor",
    "max(Tensor x) -> Tensor",
    "add_(Tensor(a!) x) -> ()",
    "view_of(Tensor(a) x) -> Tensor(a)",
    "no_tensor(int n) -> int",
    "stream(Tensor x, Generator g) -> Tensor",
    "no_kernel(Tensor x) -> Tensor",
)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Loads a library whose operators have kernels for the CPU."""
    for name, empty in (("_libraries", {}), ("_offered", {}), ("_unchecked", set())):
        monkeypatch.setattr(extensions, name, empty)
    lines = ["import torch", "__version__ = '7'", "lib = torch.library.Library('offered_here', 'DEF')"]
    for schema in SCHEMAS:
        lines.append(f"lib.define({schema!r})")
        if "no_kernel" not in schema:
            lines.append(f"lib.impl({schema.partition('(')[0]!r}, lambda *args: args[0], 'CPU')")
    (tmp_path / "offered_here.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)

    def load(*laws, stateless=()):
        extensions.load(["offered_here"], device_key="CPU", laws=frozenset(laws), stateless=frozenset(stateless))

    yield load
    module = sys.modules.pop("offered_here", None)
    if module is not None:
        module.lib._destroy()


def extern(name):
    return Form("extern", (), (), (("args", ()), ("kwargs", ()), ("name", name)))


def test_load_offers_operators_that_programs_can_call(library):
    library()
    facts = extensions.facts(opaque=True)["offered_here"]
    assert sorted(facts["operators"]) == [f"offered_here.{n}.default" for n in ("add_", "max", "plain")]
    assert facts["version"] == "7" and facts["withheld"] == []
    assert extensions.versions() == {"offered_here": "7"}


def test_load_withholds_unchecked_operators_from_sessions_without_permission(library):
    library()
    facts = extensions.facts(opaque=False)["offered_here"]
    assert facts["withheld"] == sorted(facts["operators"])
    assert extensions.unchecked_operators([extern("offered_here.plain.default"), extern("aten.add.Tensor")]) == {
        "offered_here.plain.default"
    }


def test_load_of_namespace_with_laws_offers_only_operators_with_laws(library):
    library("offered_here.plain")
    facts = extensions.facts(opaque=False)["offered_here"]
    assert list(facts["operators"]) == ["offered_here.plain.default"] and facts["withheld"] == []


def test_load_names_operators_that_may_keep_values(library):
    library()
    facts = extensions.facts(opaque=True)["offered_here"]
    assert facts["stateful"] == sorted(facts["operators"])


def test_load_of_operators_with_laws_names_none_that_keep_values(library):
    library("offered_here.plain")
    assert extensions.facts(opaque=True)["offered_here"]["stateful"] == []


def test_load_of_a_stateless_library_names_no_operators_that_keep_values(library, caplog):
    library(stateless=["offered_here", "elsewhere"])
    assert extensions.facts(opaque=True)["offered_here"]["stateful"] == []
    assert "STATELESS_LIBRARIES names elsewhere" in caplog.text


def test_load_of_missing_library_names_setting():
    with pytest.raises(
        extensions.ExtensionLibraryError, match=r"cannot import no_such_library.*WOOLY_EXECUTOR_LIBRARIES"
    ):
        extensions.load(["no_such_library"], device_key="CPU", laws=frozenset())


def test_library_call_of_operator_that_is_not_offered_is_refused(library):
    library()
    assert str(library_call(extern("offered_here.plain.default")).op) == "offered_here.plain.default"
    for name in ("offered_here.view_of.default", "somewhere.read_file.default"):
        with pytest.raises(OperationError, match=r"not in the allow-list, and this executor offers offered_here 7"):
            library_call(extern(name))


def test_operator_with_name_of_librarys_gets_no_facts_of_it(library):
    library()
    op = torch.ops.offered_here.add_.default
    assert not writes_all(op) and writes_all(torch.ops.aten.add_.Tensor)
    assert law_of(op) is None and not set(LAWS) & set(EXTENSION_LAWS)


def test_rules_of_work_cover_operators_with_laws():
    assert set(RULES) == set(EXTENSION_LAWS)
    view = View(DType.F32, (10, 10), (10, 1), 0)
    assert of_extension("somewhere.op", Given({"x": view}, [view])).elements == UNKNOWN * 200


def regions(**changes):
    given = {
        "input": torch.zeros(2, 4, 8, 8), "rois": torch.tensor([[1.0, 0, 0, 4, 4]]), "spatial_scale": 1.0,
        "pooled_height": 2, "pooled_width": 2, "sampling_ratio": 2, "aligned": False,
    }  # fmt: skip
    return given | changes


def check(law, given):
    for one in (law.shapes, law.values):
        if one is not None:
            one(given)


@pytest.mark.parametrize(
    "changes",
    [
        {"rois": torch.tensor([[2.0, 0, 0, 4, 4]])},
        {"rois": torch.tensor([[-1.0, 0, 0, 4, 4]])},
        {"rois": torch.tensor([[-0.5, 0, 0, 4, 4]])},
        {"rois": torch.tensor([[float("nan"), 0, 0, 4, 4]])},
        {"rois": torch.tensor([[0, float("nan"), 0, 4, 4]])},
        {"rois": torch.tensor([[0, 0, 0, float("inf"), 4]])},
        {"rois": torch.tensor([[0, 0, 0, 1e9, 4]])},
        {"rois": torch.tensor([[0, 0, 0, 1e6, 1e6]]), "sampling_ratio": 0},
        {"rois": torch.zeros(1, 4)},
        {"rois": torch.zeros(1, 5, dtype=torch.float64)},
        {"input": torch.zeros(2, 4, 0, 8)},
        {"input": torch.zeros(4, 8, 8)},
        {"pooled_height": 0},
        {"pooled_width": -1},
        {"sampling_ratio": 1 << 20},
        {"spatial_scale": float("nan")},
    ],
)
def test_law_of_roi_align_refuses_what_reads_out_of_bounds(changes):
    law = EXTENSION_LAWS["torchvision.roi_align"]
    check(law, regions())
    with pytest.raises(RuntimeError):
        check(law, regions(**changes))


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"argmax": torch.full((1, 4, 2, 2), 64, dtype=torch.int32)}, False),
        ({"argmax": torch.full((1, 4, 2, 2), -2, dtype=torch.int32)}, False),
        ({"argmax": torch.zeros(1, 4, 2, 2, dtype=torch.int64)}, False),
        ({"argmax": torch.zeros(1, 4, 2, 1, dtype=torch.int32)}, False),
        ({"grad": torch.zeros(1, 4, 2, 3)}, False),
        ({"batch_size": 1}, False),
        ({"channels": 3}, False),
        ({"height": 1 << 30}, False),
    ],
)
def test_law_of_roi_pool_backward_checks_map_of_forward(changes, good):
    given = regions(
        grad=torch.zeros(1, 4, 2, 2), argmax=torch.full((1, 4, 2, 2), -1, dtype=torch.int32), batch_size=2, channels=4,
        height=8, width=8,
    )  # fmt: skip
    del given["sampling_ratio"]
    law = EXTENSION_LAWS["torchvision._roi_pool_backward"]
    if good:
        check(law, given | changes)
        return
    with pytest.raises(RuntimeError):
        check(law, given | changes)


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"offset": torch.full((2, 18, 8, 8), float("nan"))}, False),
        ({"offset": torch.full((2, 18, 8, 8), float("inf"))}, True),
        ({"offset": torch.zeros(2, 16, 8, 8)}, False),
        ({"mask": torch.zeros(2, 9, 8, 7), "use_mask": True}, False),
        ({"mask": torch.zeros(2, 9, 8, 8), "use_mask": True}, True),
        ({"bias": torch.zeros(4)}, False),
        ({"stride_h": 0}, False),
        ({"groups": 0}, False),
        ({"offset_groups": 3}, False),
        ({"weight": torch.zeros(5, 4, 3, 3, dtype=torch.float64)}, False),
        ({"grad": torch.zeros(2, 5, 8, 7)}, False),
    ],
)
def test_law_of_deform_conv2d_backward_checks_all_shapes(changes, good):
    given = {
        "input": torch.zeros(2, 4, 10, 10), "weight": torch.zeros(5, 4, 3, 3), "offset": torch.zeros(2, 18, 8, 8),
        "mask": torch.zeros(2, 0), "bias": torch.zeros(5), "grad": torch.zeros(2, 5, 8, 8), "stride_h": 1, "stride_w": 1,
        "pad_h": 0, "pad_w": 0, "dilation_h": 1, "dilation_w": 1, "groups": 1, "offset_groups": 1, "use_mask": False,
    }  # fmt: skip
    law = EXTENSION_LAWS["torchvision._deform_conv2d_backward"]
    if good:
        check(law, given | changes)
        return
    with pytest.raises(RuntimeError):
        check(law, given | changes)
