"""What the interpreter itself says of a frame and those that called it."""


def frames(frame):
    """Innermost first: file, function, line."""
    found = []
    while frame:
        code = frame.f_code
        function = getattr(code, "co_qualname", code.co_name)
        found.append({"file": code.co_filename, "function": function, "line": frame.f_lineno})
        frame = frame.f_back
    return found
