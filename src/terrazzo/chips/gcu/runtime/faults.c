/* What the processor refuses while a kernel or a copy runs ends that kernel or copy, and nothing
   else. Faults of anybody else's code go to whoever handled them before. */
#include "internal.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static const int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
enum { CAUGHT = sizeof caught / sizeof caught[0] };
static struct sigaction before[CAUGHT];

/* Read by a signal handler, where memory for thread-local variables cannot be made first. */
static _Thread_local Guard *volatile innermost __attribute__((tls_model("initial-exec")));

void enter(Guard *guard) {
  guard->outer = innermost;
  innermost = guard;
}

void leave(Guard *guard) { innermost = guard->outer; }

void hit_outer(int signal, void *address) {
  Guard *guard = innermost;
  guard->signal = signal, guard->address = address;
  innermost = guard->outer;
  siglongjmp(guard->jump, 1);
}

static void hand_on(int signal, siginfo_t *info, void *context) {
  int which = 0;
  while (caught[which] != signal) which++;
  const struct sigaction *old = &before[which];
  if (old->sa_flags & SA_SIGINFO) {
    old->sa_sigaction(signal, info, context);
  } else if (old->sa_handler == SIG_DFL || old->sa_handler == SIG_IGN) {
    /* The instruction is tried again and then ends the process, as it would without us. */
    sigaction(signal, old, NULL);
    if (info->si_code <= 0) raise(signal);
  } else {
    old->sa_handler(signal);
  }
}

static void on_fault(int signal, siginfo_t *info, void *context) {
  /* A code of zero or less: somebody sent the signal. */
  if (innermost && info->si_code > 0) {
    /* The handler is left by a jump, and one that came before it may have blocked the signal. */
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, signal);
    pthread_sigmask(SIG_UNBLOCK, &blocked, NULL);
    hit_outer(signal, info->si_addr);
  }
  hand_on(signal, info, context);
}

void catch_faults(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int which = 0; which < CAUGHT; which++) sigaction(caught[which], &action, &before[which]);
}

const char *fault_text(int signal, const void *address, char *text, size_t room) {
  if (signal == SIGFPE) snprintf(text, room, "divided an integer by zero");
  else if (signal == SIGILL) snprintf(text, room, "met an instruction that is not there");
  else if (address) snprintf(text, room, "touched memory that is not there, at %p", address);
  else snprintf(text, room, "touched memory that is not there, at NULL or at no address at all");
  return text;
}
