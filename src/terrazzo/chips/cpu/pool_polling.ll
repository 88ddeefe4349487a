; Without a futex a sleeper polls, and waking is left to its alarm.
declare i32 @usleep(i32)
define internal void @sleep_while(ptr %word, i32 %value) nounwind {
  %slept = call i32 @usleep(i32 100)
  ret void
}
define internal void @wake(ptr %word, i32 %count) nounwind {
  ret void
}
define internal void @note_core() nounwind {
  ret void
}
define internal void @move_away() nounwind {
  ret void
}
