def around_process_messages(original, *args, **kwargs):
    return original(*args, **kwargs)
