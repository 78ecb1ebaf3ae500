// lockd's alerts, recording rules and dashboards as a monitoring mixin. It reads the files that are committed, so that
// there is one place for each. Jsonnet and go-jsonnet 0.22 read them. Debian 12's jsonnet 0.18 does not: its
// std.parseYaml fails on texts of several lines.
{
  _config+:: {
    // Where docs/runbooks/ is: runbook_url of each alert is below it.
    runbooks: 'https://example.com/lockd/docs/runbooks/',
    // The scrape job of lockd; LockdDown asks for its targets.
    job: 'lockd',
  },

  local rules(text) = std.parseYaml(
    std.strReplace(
      std.strReplace(text, 'https://example.com/lockd/docs/runbooks/', $._config.runbooks),
      'job="lockd"',
      'job="%s"' % $._config.job
    )
  ),

  prometheusAlerts+:: rules(importstr 'lockd.rules.yml'),

  prometheusRules+:: rules(importstr 'lockd.recording.yml'),

  grafanaDashboards+:: {
    'lockd-fleet.json': import '../../grafana/lockd-fleet.json',
    'lockd-service.json': import '../../grafana/lockd-service.json',
    'lockd-host.json': import '../../grafana/lockd-host.json',
    'lockd-lock.json': import '../../grafana/lockd-lock.json',
  },
}
