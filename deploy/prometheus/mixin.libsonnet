// lockd's alerts, recording rules and dashboards as a monitoring mixin. It reads the files that are committed, so that
// nothing is written twice. jsonnet and go-jsonnet 0.22 can evaluate it. Debian 12's jsonnet 0.18 cannot: its
// std.parseYaml fails on YAML strings of several lines.
{
  _config+:: {
    // The address of docs/runbooks/, with which the runbook_url of each alert begins.
    runbooks: 'https://example.com/lockd/docs/runbooks/',
    // The name of lockd's scrape job, which LockdDown and cluster_job:lockd_down:count ask for.
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
