#include "stop.h"

#include <signal.h>

#include <atomic>
#include <csignal>
#include <initializer_list>

namespace kda::program {
namespace {

/// Any thread may take a signal.
std::atomic<bool> signal_came{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // or a handler could not use it

extern "C" void ask_to_stop(int signal) {
  if (!signal_came.exchange(true)) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // taken when this handler has returned
}

}  // namespace

void stop_on_signals() {
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = ask_to_stop;
    action.sa_flags = SA_RESTART;  // no write is cut short
    sigaddset(&action.sa_mask, SIGINT);
    sigaddset(&action.sa_mask, SIGTERM);
    sigaction(signal, &action, nullptr);
  }
}

bool stop_wanted() { return signal_came; }

}  // namespace kda::program
