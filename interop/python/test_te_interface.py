"""TransformerEngine's interface, name by name, and the table of the guide."""

import dataclasses
import inspect
import json
import os
import pathlib
import re

import pytest
import torch
from torch.optim.optimizer import required

import nvfp4.te as te

THEIRS = json.loads((pathlib.Path(__file__).parent / "te-signatures.json").read_text())
SIGNATURES, METHODS = THEIRS["signatures"], THEIRS["methods"]
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "transformer-engine.md"
# What differs, and why.
DEVICE = "modules are made on torch's own default device, which may be a CPU"
# Methods with other arguments.
LONGER = {
    "alloc_tensors": "a quantizer of one's own may pin the memory too, as make_empty does there",
    "clone": "torch.Tensor.clone has a memory_format",
    "get_data_tensors": "NVFP4 has the arguments of the other formats",
    "size": "torch.Tensor.size has its dim",
    "view": "torch.Tensor.view takes a shape in parts",
}


def offered(path):
    thing = te
    for part in path.split("."):
        thing = getattr(thing, part, None)
    return thing


def arguments(thing):
    """The names of arguments as the file has them: with the stars."""
    names, star = [], False
    for given in inspect.signature(thing).parameters.values():
        if given.name in ("self", "cls"):
            continue
        if given.kind is given.KEYWORD_ONLY and not star:
            names.append("*")
        star = star or given.kind in (given.KEYWORD_ONLY, given.VAR_POSITIONAL)
        names.append(
            {given.VAR_POSITIONAL: "*", given.VAR_KEYWORD: "**"}.get(given.kind, "") + given.name
        )
    return names


def defaults(thing):
    """Defaults by name; those of a recipe that the environment gives are a new recipe's."""
    given = {
        p.name: p.default
        for p in inspect.signature(thing).parameters.values()
        if p.default is not p.empty
    }
    if dataclasses.is_dataclass(thing):
        made = thing(str) if "qfactory" in inspect.signature(thing).parameters else thing()
        given = {name: getattr(made, name) for name in given}
    return given


@pytest.mark.parametrize("path", [path for path in SIGNATURES if offered(path) is not None])
def test_arguments_stand_where_transformer_engines_stand(path):
    thing, theirs = offered(path), SIGNATURES[path]
    if theirs is None:
        return
    assert arguments(thing) == [argument[0] for argument in theirs]
    known = {
        "os": os,
        "Format": te.Format,
        "MMParams": te.MMParams,
        "DType": te.DType,
        "torch": torch,
        "required": required,
    }
    expected = {argument[0]: eval(argument[1], known) for argument in theirs if len(argument) > 1}
    found = defaults(thing)
    assert found.keys() == expected.keys()
    different = {
        name
        for name in found
        if found[name] != expected[name] or type(found[name]) is not type(expected[name])
    }
    assert different <= {"device"} and all(found[name] is None for name in different), DEVICE


METHOD_PATHS = [
    f"{path}.{method}"
    for path, methods in METHODS.items()
    for method in methods
    if offered(path) is not None
]
REFUSED = [path for path in METHOD_PATHS if hasattr(offered(path), "why")]


@pytest.mark.parametrize("path", METHOD_PATHS)
def test_methods_take_what_transformer_engines_take(path):
    of, method = path.rsplit(".", 1)
    theirs = METHODS[of][method]
    found = inspect.getattr_static(offered(of), method, None)
    assert found is not None
    if theirs is None:
        assert isinstance(found, property) or inspect.isgetsetdescriptor(found)
    elif path not in REFUSED:
        ours, theirs = arguments(offered(path)), [argument[0] for argument in theirs]
        assert ours == theirs or method in LONGER, LONGER.get(method)


def test_what_differs_in_arguments_differs():
    different = {
        path.rsplit(".", 1)[1]
        for path in METHOD_PATHS
        if (theirs := METHODS[path.rsplit(".", 1)[0]][path.rsplit(".", 1)[1]]) is not None
        and path not in REFUSED
        and arguments(offered(path)) != [argument[0] for argument in theirs]
    }
    assert different == LONGER.keys()


@pytest.mark.parametrize("path", REFUSED)
def test_a_method_that_is_left_out_says_why(path):
    method = path.rsplit(".", 1)[1]
    with pytest.raises(NotImplementedError, match=f"{method} is not supported here: {offered(path).why}"):
        offered(path)(None)


def test_enumerations_have_transformer_engines_members():
    assert {name: tuple(member.value) for name, member in te.Format.__members__.items()} == {
        "E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344),
    }  # fmt: skip
    assert te.Format.HYBRID.value.max_fwd == 448 and te.Format.HYBRID.value.max_bwd == 57344
    assert te.DType.cast(7) is te.DType.kFloat8E4M3 and [int(member) for member in te.DType] == [
        0,
        2,
        4,
        5,
        6,
        7,
        8,
        10,
    ]


def rows():
    """The state of each name in the guide's tables, and what is said about it."""
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in GUIDE.read_text().splitlines()
        if line.startswith("| `")
    ]
    return {
        name: (state, note)
        for names, state, note in cells
        for name in re.findall(r"`([\w.]+)`", names)
    }


def test_the_guide_says_of_every_name_whether_it_is_there():
    table = rows()
    names = {path for path in SIGNATURES if not path.endswith((".forward", ".__call__"))}
    assert names | set(REFUSED) == table.keys()
    assert {state for state, _ in table.values()} <= {"there", "limits", "not yet", "left out"}
    for name, (state, note) in table.items():
        there = offered(name) is not None and name not in REFUSED
        assert there == (state in ("there", "limits")), name
        assert note or state in ("there", "not yet"), name
    left_out = {name for name, (state, _) in table.items() if state == "left out"}
    assert left_out == set(te._WHY) | set(REFUSED)


@pytest.mark.parametrize("name", te._WHY)
def test_a_name_that_is_left_out_says_why(name):
    with pytest.raises(AttributeError, match=f"nvfp4.te has no '{name}': {te._WHY[name]}"):
        getattr(te, name)


def test_rows_of_gated_layers_are_brought_in_turn():
    rows = torch.arange(16).reshape(8, 2)
    turned = te.interleave_glu_tensor(rows, 2)
    assert turned[:, 0].tolist() == [0, 2, 8, 10, 4, 6, 12, 14]
    assert torch.equal(te.deinterleave_glu_tensor(turned, 2), rows)
    for wrong in (0, 3):
        with pytest.raises(
            ValueError, match="a positive interleave_size and a multiple of twice of it"
        ):
            te.interleave_glu_tensor(rows, wrong)
