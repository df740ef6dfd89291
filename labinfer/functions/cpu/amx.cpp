// Permission to use AMX tiles.
#include "amx.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

extern "C" {

// Requests tiles from the kernel, once for all threads of this process: it then saves them at context switches (Linux kernel documentation,
// x86/xstate).
int64_t allow_amx() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

}  // extern "C"
#endif
