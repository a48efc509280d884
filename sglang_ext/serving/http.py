def before_setup_and_run_http_server(*args, **kwargs):
    return None
