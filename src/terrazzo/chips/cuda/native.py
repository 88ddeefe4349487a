"""Launches without Python between them: a table of kernels, and native code that goes through it.

One function of LLVM's, the same for every executable, walks a table of 64-bit numbers:

    launcher, slots, launches, most arguments;
    for each launch: function, programs, threads, shared memory, arguments,
                     and for each argument: which base, and what is added to it

Bases are what a call brings: 0, then the addresses of inputs and outputs (the slots), of the arena
and of room for one call. A constant or a size is a number added to base 0. The launcher is the
driver's cuLaunchKernel, or what stands in for it. Arguments lie on the stack of the thread that
calls, and Python's lock is let go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from terrazzo.chips.registry import DEFAULT, chip_named

MISALIGNED = -1  # what `launch` answers where a slot does not begin where kernels load
ENTRY = "tz_launch"


@dataclass(frozen=True)
class Launch:
    """One line of a table; arguments are pairs of a base's number and what is added to it."""

    function: int
    programs: int
    threads: int
    shared: int
    arguments: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Loaded:
    """One version of a kernel on a GPU."""

    function: int
    threads: int
    shared: int
    scratch: int  # bytes of memory that each program has for its descriptors
    extra: int  # pointers of Triton's own at the end: that memory, and some that stay zero


class Table:
    """Launches in memory, where native code reads them."""

    def __init__(self, launcher: int, slots: int, launches: Sequence[Launch]):
        most = max((len(entry.arguments) for entry in launches), default=0)
        numbers = [launcher, slots, len(launches), most]
        for entry in launches:
            numbers += [entry.function, entry.programs, entry.threads, entry.shared,
                        len(entry.arguments)]
            numbers += [n for pair in entry.arguments for n in pair]
        self.numbers = (ctypes.c_int64 * len(numbers))(*map(_signed, numbers))
        self.address = ctypes.addressof(self.numbers)


def line(kernel: Loaded, grid: int, given: Sequence[tuple[int, int]], scratch: tuple[int, int]
         ) -> Launch:
    """A line of a table: what the kernel is given by us, and after that what Triton adds."""
    own = [scratch] * bool(kernel.scratch)
    own += [(0, 0)] * (kernel.extra - len(own))
    return Launch(kernel.function, grid, kernel.threads, kernel.shared, (*given, *own))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


@cache
def launch() -> Callable[..., int]:
    """The function: the address of a table, all bases but the first one, and a stream.

    It answers 0, or what the launcher did that failed first, or MISALIGNED.
    """
    found: Callable[..., int] = chip_named(DEFAULT).native(TEXT, ENTRY)
    return found


TEXT = f"""
declare i64 @PyLong_AsUnsignedLongLongMask(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyErr_Occurred()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define internal i64 @walk(ptr %table, ptr %bases, ptr %stream) {{
start:
  %launcher = load ptr, ptr %table
  %slots_at = getelementptr i64, ptr %table, i64 1
  %slots = load i64, ptr %slots_at
  %launches_at = getelementptr i64, ptr %table, i64 2
  %launches = load i64, ptr %launches_at
  %most_at = getelementptr i64, ptr %table, i64 3
  %most = load i64, ptr %most_at
  %values = alloca i64, i64 %most
  %pointers = alloca ptr, i64 %most
  br label %slots_head

slots_head:
  %s = phi i64 [ 0, %start ], [ %s_next, %slots_body ]
  %seen = phi i64 [ 0, %start ], [ %seen_next, %slots_body ]
  %s_more = icmp ult i64 %s, %slots
  br i1 %s_more, label %slots_body, label %slots_done
slots_body:
  %s_next = add i64 %s, 1
  %slot_at = getelementptr i64, ptr %bases, i64 %s_next
  %slot = load i64, ptr %slot_at
  %seen_next = or i64 %seen, %slot
  br label %slots_head
slots_done:
  %odd = and i64 %seen, 15
  %is_odd = icmp ne i64 %odd, 0
  br i1 %is_odd, label %misaligned, label %pointers_head
misaligned:
  ret i64 {MISALIGNED}

pointers_head:
  %p = phi i64 [ 0, %slots_done ], [ %p_next, %pointers_body ]
  %p_more = icmp ult i64 %p, %most
  br i1 %p_more, label %pointers_body, label %launches_head0
pointers_body:
  %value_at = getelementptr i64, ptr %values, i64 %p
  %pointer_at = getelementptr ptr, ptr %pointers, i64 %p
  store ptr %value_at, ptr %pointer_at
  %p_next = add i64 %p, 1
  br label %pointers_head

launches_head0:
  %first = getelementptr i64, ptr %table, i64 4
  br label %launches_head
launches_head:
  %l = phi i64 [ 0, %launches_head0 ], [ %l_next, %launched ]
  %line = phi ptr [ %first, %launches_head0 ], [ %arguments_end, %launched ]
  %l_more = icmp ult i64 %l, %launches
  br i1 %l_more, label %launches_body, label %done
launches_body:
  %function = load ptr, ptr %line
  %grid_at = getelementptr i64, ptr %line, i64 1
  %grid64 = load i64, ptr %grid_at
  %grid = trunc i64 %grid64 to i32
  %threads_at = getelementptr i64, ptr %line, i64 2
  %threads64 = load i64, ptr %threads_at
  %threads = trunc i64 %threads64 to i32
  %shared_at = getelementptr i64, ptr %line, i64 3
  %shared64 = load i64, ptr %shared_at
  %shared = trunc i64 %shared64 to i32
  %count_at = getelementptr i64, ptr %line, i64 4
  %count = load i64, ptr %count_at
  %arguments = getelementptr i64, ptr %line, i64 5
  %length = shl i64 %count, 1
  %arguments_end = getelementptr i64, ptr %arguments, i64 %length
  br label %arguments_head

arguments_head:
  %a = phi i64 [ 0, %launches_body ], [ %a_next, %arguments_body ]
  %a_more = icmp ult i64 %a, %count
  br i1 %a_more, label %arguments_body, label %run
arguments_body:
  %a2 = shl i64 %a, 1
  %which_at = getelementptr i64, ptr %arguments, i64 %a2
  %which = load i64, ptr %which_at
  %added_at = getelementptr i64, ptr %which_at, i64 1
  %added = load i64, ptr %added_at
  %base_at = getelementptr i64, ptr %bases, i64 %which
  %base = load i64, ptr %base_at
  %value = add i64 %base, %added
  %put_at = getelementptr i64, ptr %values, i64 %a
  store i64 %value, ptr %put_at
  %a_next = add i64 %a, 1
  br label %arguments_head

run:
  %status = call i32 %launcher(ptr %function, i32 %grid, i32 1, i32 1, i32 %threads, i32 1, i32 1,
                               i32 %shared, ptr %stream, ptr %pointers, ptr null)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %wrong, label %launched
launched:
  %l_next = add i64 %l, 1
  br label %launches_head
wrong:
  %status64 = sext i32 %status to i64
  ret i64 %status64
done:
  ret i64 0
}}

define ptr @{ENTRY}(ptr %self, ptr %args, i64 %nargs) {{
start:
  %bases = alloca i64, i64 %nargs
  br label %head
head:
  %i = phi i64 [ 0, %start ], [ %next, %body ]
  %more = icmp ult i64 %i, %nargs
  br i1 %more, label %body, label %read
body:
  %object_at = getelementptr ptr, ptr %args, i64 %i
  %object = load ptr, ptr %object_at
  %number = call i64 @PyLong_AsUnsignedLongLongMask(ptr %object)
  %base_at = getelementptr i64, ptr %bases, i64 %i
  store i64 %number, ptr %base_at
  %next = add i64 %i, 1
  br label %head
read:
  %error = call ptr @PyErr_Occurred()
  %wrong = icmp ne ptr %error, null
  br i1 %wrong, label %refuse, label %go
refuse:
  ret ptr null
go:
  %table64 = load i64, ptr %bases
  %table = inttoptr i64 %table64 to ptr
  store i64 0, ptr %bases
  %last = sub i64 %nargs, 1
  %stream_at = getelementptr i64, ptr %bases, i64 %last
  %stream64 = load i64, ptr %stream_at
  %stream = inttoptr i64 %stream64 to ptr
  %state = call ptr @PyEval_SaveThread()
  %status = call i64 @walk(ptr %table, ptr %bases, ptr %stream)
  call void @PyEval_RestoreThread(ptr %state)
  %answer = call ptr @PyLong_FromLongLong(i64 %status)
  ret ptr %answer
}}
"""
