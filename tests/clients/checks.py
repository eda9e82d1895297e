"""The checks of one client: functions that raise where the server is wrong."""

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def run():
    """Prints one line per check and ends with the number that passed, which tests/serve_clients.rs reads."""
    for function in CHECKS:
        function()
        print("ok", function.__name__)
    print(len(CHECKS), "passed")
