from mezzo_core.papers import environment


def test_a_report_names_the_version_where_the_commit_is_unknown(monkeypatch):
    monkeypatch.setattr(environment, "commit", lambda: None)
    monkeypatch.setattr(environment, "_version", lambda package: f"version of {package}")
    described = environment.describe_environment()["commit"]
    assert described == "unknown (mezzo-core version of mezzo-core)"
