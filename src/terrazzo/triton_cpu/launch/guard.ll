; fn, ctx, whether one of its chunks had a fault, then the fields of that one
%Call = type { ptr, ptr, i64, i64, i64, i64 }
; what setjmp needs, the call, the chunk
%Frame = type { [5 x ptr], ptr, i64 }

@tz_faults = global i64 0, align 64
@tz_fault_ring = global [${RING_FIELDS} x i64] zeroinitializer, align 64
@tz_ranges = global ptr null, align 8
@tz_range_count = global i64 0, align 8
@frame_key = internal global i64 0, align 8
@before11 = internal global [${ACTION_BYTES} x i8] zeroinitializer, align 16
@before7 = internal global [${ACTION_BYTES} x i8] zeroinitializer, align 16

declare void @tz_parallel_for(ptr, ptr, i64, i64)
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i64)
declare i32 @pthread_setspecific(i64, ptr)
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @llvm.eh.sjlj.setjmp(ptr)
declare ptr @llvm.frameaddress.p0(i32)
declare ptr @llvm.stacksave.p0()

define void @tz_guard_init() nounwind {
  %action = alloca [${ACTION_BYTES} x i8], align 16
  store [${ACTION_BYTES} x i8] zeroinitializer, ptr %action
  store ptr @on_fault, ptr %action
  %flags = getelementptr i8, ptr %action, i64 ${ACTION_FLAGS}
  store i32 ${FLAGS}, ptr %flags
  %key = call i32 @pthread_key_create(ptr @frame_key, ptr null)
  %set11 = call i32 @sigaction(i32 11, ptr %action, ptr @before11)
  %set7 = call i32 @sigaction(i32 7, ptr %action, ptr @before7)
  ret void
}

; What the pool calls: a chunk of programs, with a place to come back to.
define internal void @chunk(ptr %call, i64 %chunk) nounwind noinline "frame-pointer"="all" {
entry:
  %frame = alloca %Frame, align 16
  %call.at = getelementptr %Frame, ptr %frame, i64 0, i32 1
  %chunk.at = getelementptr %Frame, ptr %frame, i64 0, i32 2
  store volatile ptr %call, ptr %call.at
  store volatile i64 %chunk, ptr %chunk.at
  %fp = call ptr @llvm.frameaddress.p0(i32 0)
  store volatile ptr %fp, ptr %frame
  %sp = call ptr @llvm.stacksave.p0()
  %sp.at = getelementptr ptr, ptr %frame, i64 2
  store volatile ptr %sp, ptr %sp.at
  %again = call i32 @llvm.eh.sjlj.setjmp(ptr %frame)
  %fresh = icmp eq i32 %again, 0
  br i1 %fresh, label %run, label %out
run:
  %key = load i64, ptr @frame_key
  %set = call i32 @pthread_setspecific(i64 %key, ptr %frame)
  %ctx.at = getelementptr %Call, ptr %call, i64 0, i32 1
  %fn = load ptr, ptr %call
  %ctx = load ptr, ptr %ctx.at
  call void %fn(ptr %ctx, i64 %chunk)
  br label %out
out:
  %key.again = load volatile i64, ptr @frame_key
  %unset = call i32 @pthread_setspecific(i64 %key.again, ptr null)
  ret void
}

define void @tz_guarded_for(ptr %fn, ptr %ctx, i64 %n, i64 %threads) nounwind {
entry:
  %call = alloca %Call, align 16
  %ctx.at = getelementptr %Call, ptr %call, i64 0, i32 1
  %had.at = getelementptr %Call, ptr %call, i64 0, i32 2
  store ptr %fn, ptr %call
  store ptr %ctx, ptr %ctx.at
  store i64 0, ptr %had.at
  call void @tz_parallel_for(ptr @chunk, ptr %call, i64 %n, i64 %threads)
  %had = load atomic i64, ptr %had.at acquire, align 8
  %fine = icmp eq i64 %had, 0
  br i1 %fine, label %out, label %tell
tell:
  %number = atomicrmw add ptr @tz_faults, i64 1 seq_cst
  %place = urem i64 %number, ${HELD}
  %first = mul i64 %place, ${FIELDS}
  %code.to = getelementptr i64, ptr @tz_fault_ring, i64 %first
  %code = ptrtoint ptr %fn to i64
  store i64 %code, ptr %code.to
  %chunk.from = getelementptr %Call, ptr %call, i64 0, i32 3
  %chunk = load i64, ptr %chunk.from
  %chunk.to = getelementptr i64, ptr %code.to, i64 1
  store i64 %chunk, ptr %chunk.to
  %n.to = getelementptr i64, ptr %code.to, i64 2
  store i64 %n, ptr %n.to
  %address.from = getelementptr %Call, ptr %call, i64 0, i32 4
  %address = load i64, ptr %address.from
  %address.to = getelementptr i64, ptr %code.to, i64 3
  store i64 %address, ptr %address.to
  %signal.from = getelementptr %Call, ptr %call, i64 0, i32 5
  %signal = load i64, ptr %signal.from
  %signal.to = getelementptr i64, ptr %code.to, i64 4
  store i64 %signal, ptr %signal.to
  br label %out
out:
  ret void
}

; Whether an instruction lies in the code of a kernel.
define internal i1 @is_ours(i64 %at) nounwind {
entry:
  %table = load ptr, ptr @tz_ranges
  %count = load i64, ptr @tz_range_count
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %on ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %test, label %no
test:
  %two = shl i64 %i, 1
  %low.at = getelementptr i64, ptr %table, i64 %two
  %high.at = getelementptr i64, ptr %low.at, i64 1
  %low = load i64, ptr %low.at
  %high = load i64, ptr %high.at
  %above = icmp uge i64 %at, %low
  %below = icmp ult i64 %at, %high
  %inside = and i1 %above, %below
  br i1 %inside, label %yes, label %on
on:
  %next = add i64 %i, 1
  br label %look
yes:
  ret i1 true
no:
  ret i1 false
}

define internal void @on_fault(i32 %signal, ptr %info, ptr %context) nounwind {
entry:
  %key = load i64, ptr @frame_key
  %frame = call ptr @pthread_getspecific(i64 %key)
  %outside = icmp eq ptr %frame, null
  br i1 %outside, label %pass, label %look
look:
  %rip.at = getelementptr i8, ptr %context, i64 ${RIP}
  %rip = load i64, ptr %rip.at
  %ours = call i1 @is_ours(i64 %rip)
  br i1 %ours, label %note, label %pass
note:
  %call.at = getelementptr %Frame, ptr %frame, i64 0, i32 1
  %call = load ptr, ptr %call.at
  %had.at = getelementptr %Call, ptr %call, i64 0, i32 2
  %swap = cmpxchg ptr %had.at, i64 0, i64 1 acq_rel monotonic
  %first = extractvalue { i64, i1 } %swap, 1
  br i1 %first, label %write, label %back
write:
  %chunk.from = getelementptr %Frame, ptr %frame, i64 0, i32 2
  %chunk = load i64, ptr %chunk.from
  %chunk.to = getelementptr %Call, ptr %call, i64 0, i32 3
  store i64 %chunk, ptr %chunk.to
  %address.from = getelementptr i8, ptr %info, i64 ${FAULT_ADDRESS}
  %address = load i64, ptr %address.from
  %address.to = getelementptr %Call, ptr %call, i64 0, i32 4
  store i64 %address, ptr %address.to
  %signal.to = getelementptr %Call, ptr %call, i64 0, i32 5
  %wide = zext i32 %signal to i64
  store i64 %wide, ptr %signal.to
  br label %back
back:
  %fp = load ptr, ptr %frame
  %ip.from = getelementptr ptr, ptr %frame, i64 1
  %ip = load ptr, ptr %ip.from
  %sp.from = getelementptr ptr, ptr %frame, i64 2
  %sp = load ptr, ptr %sp.from
  store ptr %ip, ptr %rip.at
  %rsp.at = getelementptr i8, ptr %context, i64 ${RSP}
  store ptr %sp, ptr %rsp.at
  %rbp.at = getelementptr i8, ptr %context, i64 ${RBP}
  store ptr %fp, ptr %rbp.at
  ret void
pass:
  %bus = icmp eq i32 %signal, 7
  %before = select i1 %bus, ptr @before7, ptr @before11
  %handler = load ptr, ptr %before
  %number = ptrtoint ptr %handler to i64
  %none = icmp ule i64 %number, 1
  br i1 %none, label %default, label %hand.on
default:
  ; It happens again when this returns, and then ends the process as it always did.
  store ptr null, ptr %before
  %reset = call i32 @sigaction(i32 %signal, ptr %before, ptr null)
  ret void
hand.on:
  call void %handler(i32 %signal, ptr %info, ptr %context)
  ret void
}
