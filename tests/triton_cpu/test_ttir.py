"""Reading the generic form of TTIR."""

from __future__ import annotations

import math

import pytest

from terrazzo.errors import CodegenError
from terrazzo.triton_cpu.frontend.ttir import (
    Type,
    parse,
    parse_attribute,
    parse_type,
    split_top,
    walk,
)

TEXT = '''
#loc = loc("kernel.py":9:1)
#loc2 = loc("/site-packages/triton/language/standard.py":223:16)
#loc3 = loc("x"(#loc4))
"builtin.module"() ({
  "tt.func"() <{function_type = (!tt.ptr<f32>, i32) -> (), sym_name = "f.<g>", sym_visibility = "public"}> ({
  ^bb0(%x: !tt.ptr<f32> loc("x"(#loc)), %n: i32 loc("n"(#loc))):
    %0 = "arith.constant"() <{value = dense<0xFF800000> : tensor<4x8xf32>}> : () -> tensor<4x8xf32> loc(#loc3)
    %a:2 = "tt.reduce"(%0, %0) <{axis = 1 : i32}> ({
    ^bb0(%b: f32 loc(callsite(#loc2 at #loc3)), %c: f32 loc(#loc), %d: f32 loc(#loc), %e: f32 loc(#loc)):
      "tt.reduce.return"(%b, %c) : (f32, f32) -> () loc(#loc)
    }) : (tensor<4x8xf32>, tensor<4x8xf32>) -> (tensor<4xf32>, tensor<4xf32>) loc(callsite(#loc2 at #loc3))
    %g = "tt.load"(%x) <{operandSegmentSizes = array<i32: 1, 0, 0>, isVolatile = false}> : (!tt.ptr<f32>) -> f32 loc(#loc)
    "cf.cond_br"(%h, %g)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 1, 0>}> : (i1, f32) -> () loc(#loc)
  ^bb1(%k: f32 loc(unknown)):  // pred: ^bb0
    "tt.return"() : () -> () loc(#loc)
  ^bb2:  // pred: ^bb0
    "tt.return"() : () -> () loc(#loc)
  }) {noinline = false, "ttg.num-ctas" = 1 : i32} : () -> () loc(#loc)
}) : () -> () loc(#loc)
#loc4 = loc("kernel.py":17:5)
'''  # noqa: E501


def test_a_function() -> None:
    module = parse(TEXT)
    entry = module.entry
    assert entry.attrs["sym_name"] == "f.<g>"
    assert entry.attrs["ttg.num-ctas"] == 1
    blocks = entry.regions[0]
    assert [b.label for b in blocks] == ["^bb0", "^bb1", "^bb2"]
    assert blocks[0].args == [("%x", Type((), "f32", True)), ("%n", Type((), "i32"))]
    constant, reduce_, load, jump = blocks[0].ops
    assert constant.attrs["value"] == -math.inf
    assert reduce_.results == ["%a#0", "%a#1"]
    assert reduce_.types == [Type((4,), "f32", is_tile=True)] * 2
    assert [name for name, _ in reduce_.regions[0][0].args] == ["%b", "%c", "%d", "%e"]
    assert load.attrs == {"operandSegmentSizes": [1, 0, 0], "isVolatile": False}
    assert jump.successors == ["^bb1", "^bb2"]
    assert len(list(walk(blocks))) == 7


def test_locations_are_the_users() -> None:
    module = parse(TEXT)
    constant, reduce_, *_ = module.entry.regions[0][0].ops
    assert module.where(constant) == "kernel.py:17"
    assert module.where(reduce_) == "kernel.py:17"


@pytest.mark.parametrize(("text", "expected"), [
    ("f32", Type((), "f32")),
    ("tensor<128x!tt.ptr<bf16>>", Type((128,), "bf16", True, True)),
    ("tensor<2x4xi1>", Type((2, 4), "i1", False, True)),
    ("!tt.ptr<i8, 1>", Type((), "i8", True)),
])
def test_types(text: str, expected: Type) -> None:
    assert parse_type(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("1 : i32", 1), ("-7 : i64", -7), ("true", True), ("1.5 : f32", 1.5),
    ("dense<true> : tensor<4xi1>", True), ("dense<-3> : tensor<4xi32>", -3),
    ("dense<[1, 2]> : tensor<2xi32>", [1, 2]), ("0x7F800000 : f32", math.inf),
    ("0x3C00 : f16", 1.0), ("0x3F80 : bf16", 1.0), ("array<i32>", []),
    ('"a \\22quoted\\22 text"', 'a "quoted" text'),
])
def test_attributes(text: str, expected: object) -> None:
    assert parse_attribute(text) == expected


def test_commas_in_brackets_and_strings_do_not_split() -> None:
    assert split_top('a = [1, 2], b = "x, y", c = (i32, i32) -> ()') == [
        "a = [1, 2]", 'b = "x, y"', "c = (i32, i32) -> ()"]


def test_what_is_no_operation_is_refused() -> None:
    with pytest.raises(CodegenError, match="cannot be read"):
        parse("what is this")


SIBLINGS = '''
"builtin.module"() ({
  "tt.func"() <{sym_name = "f", sym_visibility = "public"}> ({
  ^bb0(%x: i1):
    %0:2 = "scf.if"(%x) ({
      %1 = "a"() : () -> i32
      "scf.yield"(%1, %1) : (i32, i32) -> ()
    }, {
      %1 = "b"() : () -> i32
      "scf.yield"(%1, %1) : (i32, i32) -> ()
    }) : (i1) -> (i32, i32)
    "c"(%0#1) : (i32) -> ()
  }) : () -> ()
}) : () -> ()
'''


def test_every_value_has_a_name_of_its_own() -> None:
    choice, user = parse(SIBLINGS).entry.regions[0][0].ops
    yes, no = (region[0].ops for region in choice.regions)
    assert yes[0].results != no[0].results
    assert yes[1].operands == yes[0].results * 2
    assert no[1].operands == no[0].results * 2
    assert user.operands == choice.results[1:]
