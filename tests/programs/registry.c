#include "registry.h"
#include <pthread.h>

pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;

void registry_lock(void)
{
    pthread_mutex_lock(&registry_mutex);
}

void registry_unlock(void)
{
    pthread_mutex_unlock(&registry_mutex);
}

void registry_log_lock(void)
{
    pthread_mutex_lock(&log_mutex);
}

void registry_log_unlock(void)
{
    pthread_mutex_unlock(&log_mutex);
}
