import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;
import java.util.concurrent.locks.ReentrantLock;

/** An idle server: pools that have little to do, workers at a queue, timers, and a lock that some threads share. */
public class Pools {
    static final ReentrantLock lock = new ReentrantLock();

    static void work() {
        lock.lock();
        try {
            LockSupport.parkNanos(500_000);
        } finally {
            lock.unlock();
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        var queue = new LinkedBlockingQueue<Runnable>();
        for (int i = 0; i < 4; i++) {
            new Thread(() -> {
                try {
                    while (true)
                        queue.take().run();
                } catch (InterruptedException end) {
                }
            }).start();
        }
        var pool = Executors.newFixedThreadPool(8);
        var timers = Executors.newScheduledThreadPool(2);
        for (int i = 0; i < 8; i++)
            pool.submit(Pools::work);
        timers.scheduleAtFixedRate(() -> pool.submit(Pools::work), 0, 100, TimeUnit.MILLISECONDS);
        timers.scheduleAtFixedRate(() -> {
            for (int i = 0; i < 4; i++)
                queue.add(Pools::work);
        }, 0, 50, TimeUnit.MILLISECONDS);
    }
}
