// Locks of the C++ library, held by three functions.
#include "holders.h"
#include <mutex>
#include <shared_mutex>

static std::mutex plain;
static std::shared_mutex shared;

HELD_LOCK(plain, std::lock_guard<std::mutex> guard(plain), )
HELD_LOCK(shared, std::unique_lock<std::shared_mutex> guard(shared), )

int main(int argc, char **argv)
{
    static const held_lock locks[] = {NAMED(plain), NAMED(shared)};

    run_holders(argc, argv, locks, 2);
}
