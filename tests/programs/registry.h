/* A library with two locks of its own. */
void registry_lock(void);
void registry_unlock(void);
void registry_log_lock(void);
void registry_log_unlock(void);
