; The pool of threads; pool.py says how it works and fills in the names in braces.

; owned, -, fn, ctx, chunks, chunks per ticket; in the second line tickets run by workers and
; whether the caller sleeps
%Job = type { i32, i32, ptr, ptr, i64, i64, [24 x i8], i64, i32, [52 x i8] }

@sets = internal global [${SLOTS} x i64] zeroinitializer, align 64
@counts = internal global [${SLOTS} x i64] zeroinitializer, align 64
@jobs = internal global [${SLOTS} x %Job] zeroinitializer, align 64
; 1 for each worker that sleeps, or is about to
@beds = internal global [${BEDS} x i32] zeroinitializer, align 64
@tz_pool_workers = global i64 0, align 64
@worker_cap = internal global i64 ${MAX_WORKERS}, align 8
@default_threads = internal global i64 1, align 8
@spin = internal global i64 0, align 8
@starting = internal global i32 0, align 8
@inside_key = internal global i64 0, align 8

declare void @llvm.x86.sse2.pause()
declare void @llvm.aarch64.isb(i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.cttz.i64(i64, i1)
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.smin.i64(i64, i64)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i64)
declare i32 @pthread_setspecific(i64, ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sched_yield()
declare i32 @sigfillset(ptr)
declare i32 @sigdelset(ptr, i32)

define void @tz_pool_init() nounwind {
  %r = call i32 @pthread_key_create(ptr @inside_key, ptr null)
  ret void
}

define void @tz_pool_configure(i64 %threads, i64 %spin) nounwind {
  store atomic i64 %threads, ptr @default_threads monotonic, align 8
  store atomic i64 %spin, ptr @spin monotonic, align 8
  ret void
}

define void @tz_pool_after_fork() nounwind {
  store [${SLOTS} x i64] zeroinitializer, ptr @sets
  store [${SLOTS} x i64] zeroinitializer, ptr @counts
  store [${SLOTS} x %Job] zeroinitializer, ptr @jobs
  call void @llvm.memset.p0.i64(ptr @beds, i8 0, i64 ${BED_BYTES}, i1 false)
  store i64 0, ptr @tz_pool_workers
  store i64 ${MAX_WORKERS}, ptr @worker_cap
  store i32 0, ptr @starting
  ret void
}

; One turn of a thread that spins.
define internal void @breathe(i64 %turn) alwaysinline nounwind {
  ${PAUSE}
  %place = and i64 %turn, ${LAST_TURN}
  %yields = icmp eq i64 %place, ${LAST_TURN}
  br i1 %yields, label %yield, label %out
yield:
  %y = call i32 @sched_yield()
  br label %out
out:
  ret void
}

; Whether a set has a chunk left that this worker may take; callers are worker -1.
define internal i1 @set_is_open(i64 %set, i64 %worker) alwaysinline nounwind {
  %bits = and i64 %set, ${SET}
  %any = icmp ne i64 %bits, 0
  %numbers = lshr i64 %set, ${SET_BITS}
  %allowed = and i64 %numbers, ${SMALL}
  %may = icmp slt i64 %worker, %allowed
  %open = and i1 %any, %may
  ret i1 %open
}

; The same of a count.
define internal i1 @count_is_open(i64 %count, i64 %worker) alwaysinline nounwind {
  %next = and i64 %count, ${MAX_TICKETS}
  %rest = lshr i64 %count, ${TICKET_BITS}
  %tickets = and i64 %rest, ${MAX_TICKETS}
  %allowed = lshr i64 %count, ${ALLOWED_AT}
  %more = icmp ult i64 %next, %tickets
  %may = icmp slt i64 %worker, %allowed
  %open = and i1 %more, %may
  ret i1 %open
}

; The chunk of a set that a worker takes next: the first one from its own share on.
define internal i64 @choose(i64 %set, i64 %worker) alwaysinline nounwind {
  %bits = and i64 %set, ${SET}
  %numbers = lshr i64 %set, ${SET_BITS}
  %allowed = and i64 %numbers, ${SMALL}
  %n = lshr i64 %numbers, ${SMALL_BITS}
  %threads = add i64 %allowed, 1
  %me = add i64 %worker, 1
  %ahead = mul i64 %me, %n
  %start = udiv i64 %ahead, %threads
  %mine = lshr i64 %bits, %start
  %none = icmp eq i64 %mine, 0
  %from = select i1 %none, i64 %bits, i64 %mine
  %skipped = call i64 @llvm.cttz.i64(i64 %from, i1 false)
  %base = select i1 %none, i64 0, i64 %start
  %chunk = add i64 %skipped, %base
  ret i64 %chunk
}

; Runs the chunks of one ticket.
define internal void @run_ticket(ptr %job, i64 %number) nounwind {
entry:
  %fn.at = getelementptr %Job, ptr %job, i64 0, i32 2
  %ctx.at = getelementptr %Job, ptr %job, i64 0, i32 3
  %n.at = getelementptr %Job, ptr %job, i64 0, i32 4
  %grain.at = getelementptr %Job, ptr %job, i64 0, i32 5
  %fn = load ptr, ptr %fn.at
  %ctx = load ptr, ptr %ctx.at
  %n = load i64, ptr %n.at
  %grain = load i64, ptr %grain.at
  %first = mul i64 %number, %grain
  %past = add i64 %first, %grain
  %end = call i64 @llvm.umin.i64(i64 %past, i64 %n)
  br label %chunks
chunks:
  %chunk = phi i64 [ %first, %entry ], [ %chunk.next, %call ]
  %more = icmp ult i64 %chunk, %end
  br i1 %more, label %call, label %out
call:
  call void %fn(ptr %ctx, i64 %chunk)
  %chunk.next = add i64 %chunk, 1
  br label %chunks
out:
  ret void
}

; Takes tickets of one slot and runs them until none is left; tells how many it took.
define internal i64 @drain(i64 %slot, i64 %worker) nounwind {
entry:
  %set.at = getelementptr i64, ptr @sets, i64 %slot
  %count.at = getelementptr i64, ptr @counts, i64 %slot
  %job = getelementptr %Job, ptr @jobs, i64 %slot
  %set = load atomic i64, ptr %set.at acquire, align 8
  br label %set.look
set.look:
  ; What was left when this worker last looked: a chunk that is gone by now is not got.
  %ran = phi i64 [ 0, %entry ], [ %ran, %set.take ], [ %ran.next, %set.run ]
  %seen = phi i64 [ %set, %entry ], [ %left, %set.take ], [ %left, %set.run ]
  %open = call i1 @set_is_open(i64 %seen, i64 %worker)
  br i1 %open, label %set.take, label %count.look
set.take:
  %chosen = call i64 @choose(i64 %seen, i64 %worker)
  %bit = shl i64 1, %chosen
  %others = xor i64 %bit, -1
  %before = atomicrmw and ptr %set.at, i64 %others acq_rel
  %left = and i64 %before, %others
  %was = and i64 %before, %bit
  %won = icmp ne i64 %was, 0
  br i1 %won, label %set.run, label %set.look
set.run:
  call void @run_ticket(ptr %job, i64 %chosen)
  %ran.next = add i64 %ran, 1
  br label %set.look
count.look:
  %counted = phi i64 [ %ran, %set.look ], [ %counted, %count.take ], [ %counted.next, %count.run ]
  %count = load atomic i64, ptr %count.at acquire, align 8
  %more = call i1 @count_is_open(i64 %count, i64 %worker)
  br i1 %more, label %count.take, label %out
count.take:
  %taken = add i64 %count, 1
  %swap = cmpxchg ptr %count.at, i64 %count, i64 %taken acq_rel monotonic
  %got = extractvalue { i64, i1 } %swap, 1
  br i1 %got, label %count.run, label %count.look
count.run:
  %number = and i64 %count, ${MAX_TICKETS}
  call void @run_ticket(ptr %job, i64 %number)
  %counted.next = add i64 %counted, 1
  br label %count.look
out:
  ret i64 %counted
}

; The first slot with a ticket for this worker, or -1. Sequentially consistent loads: going to
; sleep relies on seeing either the new job here or the sleeper there (Dekker).
define internal i64 @find_work(i64 %worker) nounwind {
entry:
  br label %look
look:
  %slot = phi i64 [ 0, %entry ], [ %slot.next, %on ]
  %set.at = getelementptr i64, ptr @sets, i64 %slot
  %set = load atomic i64, ptr %set.at seq_cst, align 8
  %in.set = call i1 @set_is_open(i64 %set, i64 %worker)
  %count.at = getelementptr i64, ptr @counts, i64 %slot
  %count = load atomic i64, ptr %count.at seq_cst, align 8
  %in.count = call i1 @count_is_open(i64 %count, i64 %worker)
  %open = or i1 %in.set, %in.count
  br i1 %open, label %found, label %on
on:
  %slot.next = add i64 %slot, 1
  %last = icmp eq i64 %slot.next, ${SLOTS}
  br i1 %last, label %nothing, label %look
found:
  ret i64 %slot
nothing:
  ret i64 -1
}

; Wakes sleepers who may help with a slot: no more than it has tickets for besides our own.
define internal void @wake_helpers(i64 %slot) nounwind {
entry:
  %set.at = getelementptr i64, ptr @sets, i64 %slot
  %set = load atomic i64, ptr %set.at monotonic, align 8
  %bits = and i64 %set, ${SET}
  %in.set = call i64 @llvm.ctpop.i64(i64 %bits)
  %numbers = lshr i64 %set, ${SET_BITS}
  %allowed.set = and i64 %numbers, ${SMALL}
  %count.at = getelementptr i64, ptr @counts, i64 %slot
  %count = load atomic i64, ptr %count.at monotonic, align 8
  %next = and i64 %count, ${MAX_TICKETS}
  %rest = lshr i64 %count, ${TICKET_BITS}
  %tickets = and i64 %rest, ${MAX_TICKETS}
  %allowed.count = lshr i64 %count, ${ALLOWED_AT}
  %uncounted = sub i64 %tickets, %next
  %is.set = icmp ne i64 %in.set, 0
  %allowed = select i1 %is.set, i64 %allowed.set, i64 %allowed.count
  %left = select i1 %is.set, i64 %in.set, i64 %uncounted
  %others = sub i64 %left, 1
  %goal = call i64 @llvm.smin.i64(i64 %others, i64 ${FAN_OUT})
  %workers = load atomic i64, ptr @tz_pool_workers monotonic, align 8
  %end = call i64 @llvm.umin.i64(i64 %allowed, i64 %workers)
  br label %look
look:
  %worker = phi i64 [ 0, %entry ], [ %worker.next, %on ]
  %woken = phi i64 [ 0, %entry ], [ %woken.next, %on ]
  %any = icmp ult i64 %worker, %end
  %wants = icmp slt i64 %woken, %goal
  %go = and i1 %any, %wants
  br i1 %go, label %peek, label %out
peek:
  %bed = getelementptr i32, ptr @beds, i64 %worker
  %asleep = load atomic i32, ptr %bed seq_cst, align 4
  %sleeps = icmp ne i32 %asleep, 0
  br i1 %sleeps, label %rouse, label %on
rouse:
  %swap = cmpxchg ptr %bed, i32 1, i32 0 seq_cst monotonic
  %won = extractvalue { i32, i1 } %swap, 1
  br i1 %won, label %shake, label %on
shake:
  call void @note_core()
  call void @wake(ptr %bed, i32 1)
  br label %on
on:
  %one = phi i64 [ 0, %peek ], [ 0, %rouse ], [ 1, %shake ]
  %woken.next = add i64 %woken, %one
  %worker.next = add i64 %worker, 1
  br label %look
out:
  ret void
}

define internal ptr @worker_main(ptr %arg) nounwind {
entry:
  %me = ptrtoint ptr %arg to i64
  %bed = getelementptr i32, ptr @beds, i64 %me
  %key = load i64, ptr @inside_key
  %r = call i32 @pthread_setspecific(i64 %key, ptr inttoptr (i64 1 to ptr))
  br label %idle
idle:
  %turn = phi i64 [ 0, %entry ], [ %turn.next, %breathe ], [ 0, %awake ], [ 0, %worked ]
  %slept = phi i1 [ 0, %entry ], [ %slept, %breathe ], [ 1, %awake ], [ 0, %worked ]
  %slot = call i64 @find_work(i64 %me)
  %none = icmp slt i64 %slot, 0
  br i1 %none, label %rest, label %work
rest:
  %patience = load atomic i64, ptr @spin monotonic, align 8
  %wait = icmp ult i64 %turn, %patience
  br i1 %wait, label %breathe, label %sleep
breathe:
  call void @breathe(i64 %turn)
  %turn.next = add i64 %turn, 1
  br label %idle
sleep:
  %in = atomicrmw xchg ptr %bed, i32 1 seq_cst
  %again = call i64 @find_work(i64 %me)
  %still = icmp slt i64 %again, 0
  br i1 %still, label %really, label %awake
really:
  call void @sleep_while(ptr %bed, i32 1)
  call void @move_away()
  br label %awake
awake:
  store atomic i32 0, ptr %bed release, align 4
  br label %idle
work:
  br i1 %slept, label %pass.on, label %run
pass.on:
  call void @wake_helpers(i64 %slot)
  br label %run
run:
  %ran = call i64 @drain(i64 %slot, i64 %me)
  %idled = icmp eq i64 %ran, 0
  br i1 %idled, label %worked, label %report
report:
  %done.at = getelementptr %Job, ptr @jobs, i64 %slot, i32 7
  %asleep.at = getelementptr %Job, ptr @jobs, i64 %slot, i32 8
  %before = atomicrmw add ptr %done.at, i64 %ran seq_cst
  %asleep = load atomic i32, ptr %asleep.at seq_cst, align 4
  %must = icmp ne i32 %asleep, 0
  br i1 %must, label %wake.caller, label %worked
wake.caller:
  ; The slot may have a new owner by now: whoever sees a wake-up it did not need looks again.
  store atomic i32 0, ptr %asleep.at seq_cst, align 4
  call void @wake(ptr %asleep.at, i32 1)
  br label %worked
worked:
  br label %idle
}

; Starts workers until there are so many, or no more can be started; one thread at a time.
define internal void @start_workers(i64 %wanted) noinline nounwind {
entry:
  %thread = alloca i64
  %blocked = alloca [128 x i8], align 16
  %before = alloca [128 x i8], align 16
  %swap = cmpxchg ptr @starting, i32 0, i32 1 acquire monotonic
  %won = extractvalue { i32, i1 } %swap, 1
  br i1 %won, label %mask, label %out
mask:
  ; Signals belong to the threads of the program; only our own faults are ours.
  %m0 = call i32 @sigfillset(ptr %blocked)
  %m1 = call i32 @sigdelset(ptr %blocked, i32 4)
  %m2 = call i32 @sigdelset(ptr %blocked, i32 ${BUS_ERROR})
  %m3 = call i32 @sigdelset(ptr %blocked, i32 8)
  %m4 = call i32 @sigdelset(ptr %blocked, i32 11)
  %m5 = call i32 @pthread_sigmask(i32 ${SIG_SETMASK}, ptr %blocked, ptr %before)
  br label %next
next:
  %have = load i64, ptr @tz_pool_workers
  %cap = load atomic i64, ptr @worker_cap monotonic, align 8
  %goal = call i64 @llvm.smin.i64(i64 %wanted, i64 %cap)
  %more = icmp slt i64 %have, %goal
  br i1 %more, label %start, label %unmask
start:
  %name = inttoptr i64 %have to ptr
  %failed = call i32 @pthread_create(ptr %thread, ptr null, ptr @worker_main, ptr %name)
  %ok = icmp eq i32 %failed, 0
  br i1 %ok, label %started, label %full
started:
  %id = load i64, ptr %thread
  %d = call i32 @pthread_detach(i64 %id)
  %count = add i64 %have, 1
  store atomic i64 %count, ptr @tz_pool_workers monotonic, align 8
  br label %next
full:
  store atomic i64 %have, ptr @worker_cap monotonic, align 8
  br label %unmask
unmask:
  %m6 = call i32 @pthread_sigmask(i32 ${SIG_SETMASK}, ptr %before, ptr null)
  store atomic i32 0, ptr @starting release, align 4
  br label %out
out:
  ret void
}

; A slot for this launch alone, or -1 when all are taken.
define internal i64 @take_slot() nounwind {
entry:
  br label %look
look:
  %slot = phi i64 [ 0, %entry ], [ %slot.next, %on ]
  %owned.at = getelementptr %Job, ptr @jobs, i64 %slot
  %owned = load atomic i32, ptr %owned.at monotonic, align 4
  %free = icmp eq i32 %owned, 0
  br i1 %free, label %try, label %on
try:
  %swap = cmpxchg ptr %owned.at, i32 0, i32 1 acquire monotonic
  %won = extractvalue { i32, i1 } %swap, 1
  br i1 %won, label %found, label %on
on:
  %slot.next = add i64 %slot, 1
  %last = icmp eq i64 %slot.next, ${SLOTS}
  br i1 %last, label %nothing, label %look
found:
  ret i64 %slot
nothing:
  ret i64 -1
}

define void @tz_parallel_for(ptr %fn, ptr %ctx, i64 %n, i64 %max_threads) nounwind {
entry:
  %single = icmp sle i64 %n, 1
  br i1 %single, label %serial, label %cap
cap:
  %default = load atomic i64, ptr @default_threads monotonic, align 8
  %lower = call i64 @llvm.smin.i64(i64 %max_threads, i64 %default)
  %capped = icmp sgt i64 %max_threads, 0
  %threads = select i1 %capped, i64 %lower, i64 %default
  %alone = icmp sle i64 %threads, 1
  br i1 %alone, label %serial, label %check.nested
check.nested:
  %key = load i64, ptr @inside_key
  %inside = call ptr @pthread_getspecific(i64 %key)
  %nested = icmp ne ptr %inside, null
  br i1 %nested, label %serial, label %staff
staff:
  %useful = call i64 @llvm.smin.i64(i64 %threads, i64 %n)
  %helpers = sub i64 %useful, 1
  %workers = load atomic i64, ptr @tz_pool_workers monotonic, align 8
  %cap.now = load atomic i64, ptr @worker_cap monotonic, align 8
  %goal = call i64 @llvm.smin.i64(i64 %helpers, i64 %cap.now)
  %few = icmp slt i64 %workers, %goal
  br i1 %few, label %hire, label %open
hire:
  ; Who finds another thread at it looks again: chunks may wait for each other, so all must come.
  ${PAUSE}
  call void @start_workers(i64 %helpers)
  br label %staff
open:
  %slot = call i64 @take_slot()
  %busy = icmp slt i64 %slot, 0
  br i1 %busy, label %serial, label %fill
fill:
  %job = getelementptr %Job, ptr @jobs, i64 %slot
  %asleep.at = getelementptr %Job, ptr %job, i64 0, i32 8
  %fn.at = getelementptr %Job, ptr %job, i64 0, i32 2
  %ctx.at = getelementptr %Job, ptr %job, i64 0, i32 3
  %n.at = getelementptr %Job, ptr %job, i64 0, i32 4
  %grain.at = getelementptr %Job, ptr %job, i64 0, i32 5
  %done.at = getelementptr %Job, ptr %job, i64 0, i32 7
  %n.less = sub i64 %n, 1
  %grain.less = udiv i64 %n.less, ${MAX_TICKETS}
  %grain = add i64 %grain.less, 1
  %tickets.less = udiv i64 %n.less, %grain
  %tickets = add i64 %tickets.less, 1
  store atomic i32 0, ptr %asleep.at monotonic, align 4
  store ptr %fn, ptr %fn.at
  store ptr %ctx, ptr %ctx.at
  store i64 %n, ptr %n.at
  store i64 %grain, ptr %grain.at
  store atomic i64 0, ptr %done.at monotonic, align 8
  ; A set has room for the chunks of a launch, or is not one.
  %fits = icmp ule i64 %n, ${SET_BITS}
  br i1 %fits, label %open.set, label %open.count
open.set:
  ; Who has no chunk there is not asked.
  %unused = sub i64 ${SET_BITS}, %n
  %all = lshr i64 ${SET}, %unused
  %helpers.up = shl i64 %helpers, ${SET_BITS}
  %n.up = shl i64 %n, ${CHUNKS_AT}
  %numbers = or i64 %helpers.up, %n.up
  %set = or i64 %numbers, %all
  %set.at = getelementptr i64, ptr @sets, i64 %slot
  %no.set = atomicrmw xchg ptr %set.at, i64 %set seq_cst
  br label %opened
open.count:
  %tickets.up = shl i64 %tickets, ${TICKET_BITS}
  %allowed = sub i64 %threads, 1
  %allowed.up = shl i64 %allowed, ${ALLOWED_AT}
  %count = or i64 %tickets.up, %allowed.up
  %count.at = getelementptr i64, ptr @counts, i64 %slot
  %no.count = atomicrmw xchg ptr %count.at, i64 %count seq_cst
  br label %opened
opened:
  call void @wake_helpers(i64 %slot)
  %in = call i32 @pthread_setspecific(i64 %key, ptr inttoptr (i64 1 to ptr))
  %own = call i64 @drain(i64 %slot, i64 -1)
  %out = call i32 @pthread_setspecific(i64 %key, ptr null)
  %theirs = sub i64 %tickets, %own
  br label %wait
wait:
  %turn = phi i64 [ 0, %opened ], [ %turn.next, %breathe ], [ 0, %doze ]
  %done = load atomic i64, ptr %done.at acquire, align 8
  %finished = icmp eq i64 %done, %theirs
  br i1 %finished, label %close, label %patience
patience:
  %limit = load atomic i64, ptr @spin monotonic, align 8
  %spins = icmp ult i64 %turn, %limit
  br i1 %spins, label %breathe, label %drowse
breathe:
  call void @breathe(i64 %turn)
  %turn.next = add i64 %turn, 1
  br label %wait
drowse:
  %awake = atomicrmw xchg ptr %asleep.at, i32 1 seq_cst
  %done.now = load atomic i64, ptr %done.at seq_cst, align 8
  %finished.now = icmp eq i64 %done.now, %theirs
  br i1 %finished.now, label %close, label %doze
doze:
  call void @sleep_while(ptr %asleep.at, i32 1)
  br label %wait
close:
  store atomic i32 0, ptr %job release, align 4
  ret void
serial:
  %empty = icmp sle i64 %n, 0
  br i1 %empty, label %end, label %one
one:
  %i = phi i64 [ 0, %serial ], [ %i.next, %one ]
  call void %fn(ptr %ctx, i64 %i)
  %i.next = add i64 %i, 1
  %last = icmp eq i64 %i.next, %n
  br i1 %last, label %end, label %one
end:
  ret void
}
