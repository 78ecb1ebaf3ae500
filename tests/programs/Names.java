import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.Semaphore;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Locks of Java programs, each in a method of its own. `java Names SCENARIO [ROUNDS=40] [HOLD_MS=50]`, with the
 * protocol of README.md. The asker's methods are compiled before it counts, for /tmp/perf-PID.map to have them.
 */
public class Names {
    private static final Object monitor = new Object();
    private static final ReentrantLock lock = new ReentrantLock();
    private static final Semaphore tokens = new Semaphore(0);
    private static boolean isNews;
    private static long count;
    private static volatile int asked;
    private static volatile int finished;

    interface Hold {
        void run() throws InterruptedException;
    }

    static void enterMonitor() {
        synchronized (monitor) {
            count++;
        }
    }

    static void lockReentrant() {
        lock.lock();
        count++;
        lock.unlock();
    }

    static void waitForNews() throws InterruptedException {
        synchronized (monitor) {
            while (!isNews) {
                monitor.wait();
            }
            isNews = false;
        }
    }

    static void takeToken() throws InterruptedException {
        tokens.acquire();
        count++;
    }

    static void ask(String scenario) throws InterruptedException {
        switch (scenario) {
            case "monitor" -> enterMonitor();
            case "reentrant" -> lockReentrant();
            case "wait" -> waitForNews();
            case "semaphore" -> takeToken();
            default -> throw new IllegalArgumentException(scenario);
        }
    }

    static void hold(String scenario, Hold hold) throws InterruptedException {
        switch (scenario) {
            case "monitor" -> {
                synchronized (monitor) {
                    hold.run();
                }
            }
            case "reentrant" -> {
                lock.lock();
                hold.run();
                lock.unlock();
            }
            case "wait" -> {
                hold.run();
                synchronized (monitor) {
                    isNews = true;
                    monitor.notify();
                }
            }
            default -> {
                hold.run();
                tokens.release();
            }
        }
    }

    /** Enough of it without waiting that the compiler comes. */
    static void warmUp(String scenario) throws InterruptedException {
        for (int i = 0; i < 200_000; i++) {
            isNews = true;
            tokens.release();
            ask(scenario);
            tokens.drainPermits();
        }
        isNews = false;
    }

    static void untilItWaits(Thread asker) throws InterruptedException {
        while (asker.getState() == Thread.State.RUNNABLE || asker.getState() == Thread.State.TIMED_WAITING) {
            Thread.sleep(1);
        }
    }

    public static void main(String[] given) throws IOException, InterruptedException {
        String scenario = given[0];
        int rounds = given.length > 1 ? Integer.parseInt(given[1]) : 40;
        int held = given.length > 2 ? Integer.parseInt(given[2]) : 50;
        warmUp(scenario);
        String comm = System.getenv("LOCKD_COMM");
        if (comm != null) {
            Files.writeString(Path.of("/proc/self/comm"), comm);
        }
        System.out.println("ready " + ProcessHandle.current().pid());
        if (System.in.read() < 0) {
            throw new IOException("the test went away");
        }
        Thread asker = new Thread(() -> {
            try {
                for (int round = 1; round <= rounds; round++) {
                    while (asked < round) {
                        Thread.sleep(1);
                    }
                    ask(scenario);
                    finished = round;
                }
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
        }, "asker");
        asker.start();
        for (int i = 1; i <= rounds; i++) {
            int round = i;
            hold(scenario, () -> {
                asked = round;
                untilItWaits(asker);
                Thread.sleep(held);
            });
            while (finished < round) {
                Thread.sleep(1);
            }
        }
        System.out.println("{\"waits\": " + rounds + "}");
        System.in.readAllBytes();
    }
}
