"""Functions that LLVM calls of its own accord, and that no library of the process has.

Its instruction selection moves conversions about: it puts bfloats into lanes of vectors by way of
float, and may round a double to a half type at once, for which processors have no instruction. Of
two steps only one may round to nearest, so the first rounds to odd: the last bit says whether
anything was lost (Boldo and Melquiond, "When double rounding is odd").
"""

from __future__ import annotations

_ROUND_TO_ODD = """
  %single = fptrunc double %x to float
  %back = fpext float %single to double
  %bits = bitcast float %single to i32
  %given_bits = bitcast double %x to i64
  %back_bits = bitcast double %back to i64
  %given_size = and i64 %given_bits, 9223372036854775807
  %back_size = and i64 %back_bits, 9223372036854775807
  %above = icmp ugt i64 %back_size, %given_size
  %step = sext i1 %above to i32
  %shorter = add i32 %bits, %step
  %odd = or i32 %shorter, 1
  %exact = fcmp ueq double %back, %x
  %chosen = select i1 %exact, i32 %bits, i32 %odd"""

_DOUBLE_TO_HALF = f"""define half @__truncdfhf2(double %x) nounwind {{{_ROUND_TO_ODD}
  %last = bitcast i32 %chosen to float
  %result = fptrunc float %last to half
  ret half %result
}}
"""

_TO_BFLOAT = """
  %high = lshr i32 %chosen, 16
  %lowest = and i32 %high, 1
  %more = add i32 %chosen, 32767
  %sum = add i32 %more, %lowest
  %rounded = lshr i32 %sum, 16
  %quiet = or i32 %high, 64
  %size = and i32 %chosen, 2147483647
  %is_nan = icmp ugt i32 %size, 2139095040
  %wide = select i1 %is_nan, i32 %quiet, i32 %rounded
  %code = trunc i32 %wide to i16
  %result = bitcast i16 %code to bfloat
  ret bfloat %result
}
"""

_DOUBLE_TO_BFLOAT = (
    f"define bfloat @__truncdfbf2(double %x) nounwind {{{_ROUND_TO_ODD}{_TO_BFLOAT}")

_SINGLE_TO_BFLOAT = f"""define bfloat @__truncsfbf2(float %x) nounwind {{
  %chosen = bitcast float %x to i32{_TO_BFLOAT}"""


def helpers(ir_text: str) -> list[str]:
    """Definitions of the conversions that a module may be in need of, by the types in it."""
    found = []
    if "bfloat" in ir_text:
        found.append(_SINGLE_TO_BFLOAT)
    if "double" in ir_text:
        found += [text for kind, text in (("half ", _DOUBLE_TO_HALF), ("bfloat", _DOUBLE_TO_BFLOAT))
                  if kind in ir_text]
    return found
