declare i64 @syscall(i64, ...)
; Sleeps if *word is still equal to value; may also wake up for no reason.
define internal void @sleep_while(ptr %word, i32 %value) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 ${FUTEX}, ptr %word, i64 128, i32 %value,
                                    ptr null, ptr null, i64 0)
  ret void
}
define internal void @wake(ptr %word, i32 %count) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 ${FUTEX}, ptr %word, i64 129, i32 %count,
                                    ptr null, ptr null, i64 0)
  ret void
}
@waker = internal global i32 -1, align 64
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
; Remembers the core of the thread that is about to wake others.
define internal void @note_core() nounwind {
  %core = call i32 @sched_getcpu()
  store atomic i32 %core, ptr @waker monotonic, align 4
  ret void
}
; Leaves the core of the thread that woke this one, if it runs there and may run elsewhere.
define internal void @move_away() nounwind {
entry:
  %allowed = alloca [${CORE_BYTES} x i8], align 16
  %others = alloca [${CORE_BYTES} x i8], align 16
  %theirs = load atomic i32, ptr @waker monotonic, align 4
  %mine = call i32 @sched_getcpu()
  %same = icmp eq i32 %theirs, %mine
  %known = icmp ult i32 %mine, ${CORES}
  %here = and i1 %same, %known
  br i1 %here, label %look, label %out
look:
  call void @llvm.memset.p0.i64(ptr %allowed, i8 0, i64 ${CORE_BYTES}, i1 false)
  %g = call i32 @sched_getaffinity(i32 0, i64 ${CORE_BYTES}, ptr %allowed)
  %got = icmp sge i32 %g, 0
  br i1 %got, label %mask, label %out
mask:
  call void @llvm.memcpy.p0.p0.i64(ptr %others, ptr %allowed, i64 ${CORE_BYTES}, i1 false)
  %byte = lshr i32 %mine, 3
  %byte.at = getelementptr i8, ptr %others, i32 %byte
  %bit = and i32 %mine, 7
  %one = shl i32 1, %bit
  %one8 = trunc i32 %one to i8
  %keep = xor i8 %one8, -1
  %old = load i8, ptr %byte.at
  %new = and i8 %old, %keep
  store i8 %new, ptr %byte.at
  ; Refused when no other core is left. What was allowed before is allowed again afterwards.
  %moved = call i32 @sched_setaffinity(i32 0, i64 ${CORE_BYTES}, ptr %others)
  %went = icmp eq i32 %moved, 0
  br i1 %went, label %restore, label %out
restore:
  %r = call i32 @sched_setaffinity(i32 0, i64 ${CORE_BYTES}, ptr %allowed)
  br label %out
out:
  ret void
}
