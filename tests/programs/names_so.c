/* Locks of a shared library. */
#include "program.h"
#include "registry.h"

static const struct scenario scenarios[] = {
    {"global", registry_lock, registry_lock, registry_unlock, registry_unlock},
    {"static", registry_log_lock, registry_log_lock, registry_log_unlock, registry_log_unlock},
};

int main(int argc, char **argv)
{
    run_program(argc, argv, scenarios, sizeof scenarios / sizeof *scenarios);
}
