import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import jdk.jfr.Recording;
import jdk.jfr.consumer.RecordedEvent;
import jdk.jfr.consumer.RecordedThread;
import jdk.jfr.consumer.RecordingFile;

/**
 * Three threads hold one monitor in turns of random length, in holdBriefly, holdForAWhile and holdForLong: for 5, 20 and
 * 75% of the time. Other threads ask for it. `java Holders ASKERS=2`, with the protocol of README.md: it works all the
 * time. When a line is read a measurement begins, which the next line ends. "holders" has the milliseconds for which
 * threads have waited while each function held the monitor, by the program's own clock, and "recorded" what Flight
 * Recorder says: the time of each wait, by the thread that had the monitor last. These threads are called as their
 * functions.
 */
public class Holders {
    record Span(long begin, long end, String holder) {}

    private static final Object shelf = new Object();
    private static final ConcurrentLinkedQueue<Span> holds = new ConcurrentLinkedQueue<>();
    private static final ConcurrentLinkedQueue<Span> waits = new ConcurrentLinkedQueue<>();

    interface Hold {
        void once(int ms, long began) throws InterruptedException;
    }

    static void holdBriefly(int ms, long began) throws InterruptedException {
        synchronized (shelf) {
            hold("holdBriefly", ms, began);
        }
    }

    static void holdForAWhile(int ms, long began) throws InterruptedException {
        synchronized (shelf) {
            hold("holdForAWhile", ms, began);
        }
    }

    static void holdForLong(int ms, long began) throws InterruptedException {
        synchronized (shelf) {
            hold("holdForLong", ms, began);
        }
    }

    static void hold(String holder, int ms, long began) throws InterruptedException {
        long begin = System.nanoTime();
        waits.add(new Span(began, begin, ""));
        Thread.sleep(ms);
        holds.add(new Span(begin, System.nanoTime(), holder));
    }

    static void ask(long began) {
        synchronized (shelf) {
            waits.add(new Span(began, System.nanoTime(), ""));
        }
    }

    private static void start(String name, Hold hold, int mostMs) {
        Random random = new Random(mostMs);
        Thread thread = new Thread(() -> {
            try {
                while (true) {
                    hold.once(1 + random.nextInt(mostMs), System.nanoTime());
                    Thread.sleep(1);
                }
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
        }, name);
        thread.setDaemon(true);
        thread.start();
    }

    public static void main(String[] given) throws IOException, InterruptedException {
        int askers = given.length > 0 ? Integer.parseInt(given[0]) : 2;
        String comm = System.getenv("LOCKD_COMM");
        if (comm != null) {
            Files.writeString(Path.of("/proc/self/comm"), comm);
        }
        Recording recording = new Recording();
        recording.enable("jdk.JavaMonitorEnter").withoutThreshold().withoutStackTrace();
        System.out.println("ready " + ProcessHandle.current().pid());
        start("holdBriefly", Holders::holdBriefly, 3);
        start("holdForAWhile", Holders::holdForAWhile, 15);
        start("holdForLong", Holders::holdForLong, 59);
        for (int i = 0; i < askers; i++) {
            start("asker" + i, (ms, began) -> ask(began), 1);
        }
        System.in.read();
        recording.start();
        holds.clear();
        waits.clear();
        long began = System.nanoTime();
        System.in.read();
        long ended = System.nanoTime();
        recording.stop();
        System.out.println(truth(began, ended, recording));
        System.in.readAllBytes();
    }

    private static String truth(long began, long ended, Recording recording) throws IOException {
        List<Span> byTime = new ArrayList<>(holds);
        byTime.sort((a, b) -> Long.compare(a.begin(), b.begin()));
        Map<String, Double> waited = new TreeMap<>();
        for (Span wait : waits) {
            for (Span hold : byTime) {
                long from = Math.max(Math.max(wait.begin(), hold.begin()), began);
                long to = Math.min(Math.min(wait.end(), hold.end()), ended);
                if (to > from) {
                    waited.merge(hold.holder(), (to - from) / 1e6, Double::sum);
                }
            }
        }
        return "{\"holders\": " + json(waited) + ", \"recorded\": " + json(recorded(recording)) + "}";
    }

    private static Map<String, Double> recorded(Recording recording) throws IOException {
        Path path = Files.createTempFile("lockd-holders", ".jfr");
        Map<String, Double> waited = new TreeMap<>();
        try {
            recording.dump(path);
            try (RecordingFile file = new RecordingFile(path)) {
                while (file.hasMoreEvents()) {
                    RecordedEvent event = file.readEvent();
                    if (event.getEventType().getName().equals("jdk.JavaMonitorEnter")) {
                        RecordedThread owner = event.getThread("previousOwner");
                        String name = owner == null ? "" : owner.getJavaName();
                        waited.merge(String.valueOf(name), event.getDuration().toNanos() / 1e6, Double::sum);
                    }
                }
            }
        } finally {
            Files.delete(path);
        }
        return waited;
    }

    private static String json(Map<String, Double> times) {
        List<String> parts = new ArrayList<>();
        times.forEach((name, ms) -> parts.add(String.format(Locale.ROOT, "\"%s\": %f", name, ms)));
        return "{" + String.join(", ", parts) + "}";
    }
}
