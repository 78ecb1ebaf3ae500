/* One thread, N futex waits that fail with EAGAIN on N different addresses, as fast as can be, then
 * BLOCKING waits that time out after 100 us on as many others. All of kind lock. No wakes. */
#include "workload.h"

int main(int argc, char **argv)
{
	long n = arg(argc, argv, 1, 100000), blocking = arg(argc, argv, 2, 1000);
	struct waits waits = { .waits = n };
	uint32_t *words = mmap(NULL, (n + blocking + 1) * sizeof *words, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (words == MAP_FAILED)
		die("mmap");
	for (long i = n; i < n + blocking; i++)
		words[i] = 2;
	ready();
	int64_t start = now_ns();
	for (long i = 0; i < n; i++)
		if (futex_wait_2(&words[i], -1) != EAGAIN)
			die("futex: no EAGAIN");
	int64_t ns = now_ns() - start;
	for (long i = n; i < n + blocking; i++) {
		struct before b = before();
		if (futex_wait_2(&words[i], 100) != ETIMEDOUT)
			die("futex: no timeout");
		after(&waits, b);
	}
	say("{\"addresses\": %ld, \"eagain_us\": %ld, \"futex\": {", n + blocking, (long)(ns / 1000));
	say_futex("lock", &waits);
	say("}, \"wakes\": 0, \"errors\": {\"EAGAIN\": %ld, \"ETIMEDOUT\": %ld}}", n, blocking);
	finish();
}
