import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.ReentrantLock;
import java.util.concurrent.locks.ReentrantReadWriteLock;
import jdk.jfr.Recording;
import jdk.jfr.consumer.RecordedClass;
import jdk.jfr.consumer.RecordedEvent;
import jdk.jfr.consumer.RecordingFile;

/**
 * Threads that take work from a queue and then want locks, all of which they sleep for on the same word.
 * `java Contention WORKERS=4`, with the protocol of README.md: idles until one line is read, works until a second one
 * is, and says how many seconds Flight Recorder saw threads wait meanwhile, by class. Each lock is held for longer than
 * the one before, so that threads which come one by one wait again, and for long beside what they spin before they
 * sleep, which Flight Recorder counts too.
 */
public class Contention {
    static class Shelf {}

    private static final ReentrantLock lock = new ReentrantLock();
    private static final ReentrantReadWriteLock table = new ReentrantReadWriteLock();
    private static final Shelf shelf = new Shelf();
    private static final LinkedBlockingQueue<Boolean> work = new LinkedBlockingQueue<>();

    static void lockReentrant() throws InterruptedException {
        lock.lock();
        try {
            Thread.sleep(6);
        } finally {
            lock.unlock();
        }
    }

    static void writeTable() throws InterruptedException {
        table.writeLock().lock();
        try {
            Thread.sleep(12);
        } finally {
            table.writeLock().unlock();
        }
    }

    static void enterMonitor() throws InterruptedException {
        synchronized (shelf) {
            Thread.sleep(20);
        }
    }

    static void worker() {
        try {
            while (work.take()) {
                lockReentrant();
                writeTable();
                enterMonitor();
            }
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }

    public static void main(String[] given) throws IOException, InterruptedException {
        int workers = given.length > 0 ? Integer.parseInt(given[0]) : 4;
        String comm = System.getenv("LOCKD_COMM");
        if (comm != null) {
            Files.writeString(Path.of("/proc/self/comm"), comm);
        }
        Recording recording = new Recording();
        for (String event : new String[] {"jdk.JavaMonitorEnter", "jdk.ThreadPark"}) {
            recording.enable(event).withoutThreshold().withoutStackTrace();
        }
        System.out.println("ready " + ProcessHandle.current().pid());
        while (System.in.available() == 0) {
            work.poll(50, TimeUnit.MILLISECONDS); // so that it is known what this is before anything is counted
        }
        System.in.read();
        recording.start();
        Thread[] threads = new Thread[workers];
        for (int i = 0; i < workers; i++) {
            threads[i] = new Thread(Contention::worker, "worker" + i);
            threads[i].start();
        }
        while (System.in.available() == 0) {
            for (int i = 0; i < workers; i++) {
                work.add(true);
            }
            Thread.sleep(200); // all have come through by then
        }
        for (int i = 0; i < workers; i++) {
            work.add(false);
        }
        for (Thread thread : threads) {
            thread.join();
        }
        System.in.read();
        recording.stop();
        System.out.println(truth(recording));
        System.in.readAllBytes();
    }

    private static String truth(Recording recording) throws IOException {
        Path path = Files.createTempFile("lockd-contention", ".jfr");
        double reentrant = 0;
        double writers = 0;
        double monitor = 0;
        double conditions = 0;
        try {
            recording.dump(path);
            try (RecordingFile file = new RecordingFile(path)) {
                while (file.hasMoreEvents()) {
                    RecordedEvent event = file.readEvent();
                    boolean isPark = event.getEventType().getName().equals("jdk.ThreadPark");
                    RecordedClass of = event.getClass(isPark ? "parkedClass" : "monitorClass");
                    String name = of == null ? "" : of.getName();
                    double seconds = event.getDuration().toNanos() / 1e9;
                    if (name.startsWith("java.util.concurrent.locks.ReentrantLock$")) {
                        reentrant += seconds;
                    } else if (name.startsWith("java.util.concurrent.locks.ReentrantReadWriteLock$")) {
                        writers += seconds;
                    } else if (name.endsWith("$Shelf")) {
                        monitor += seconds;
                    } else if (name.endsWith("$ConditionObject")) {
                        conditions += seconds;
                    }
                }
            }
        } finally {
            Files.delete(path);
        }
        return String.format(
                java.util.Locale.ROOT,
                "{\"reentrant\": %f, \"writers\": %f, \"monitor\": %f, \"conditions\": %f}",
                reentrant, writers, monitor, conditions);
    }
}
