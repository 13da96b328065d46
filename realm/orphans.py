"""Ends a process when its parent process has ended, because a killed parent cannot end its child processes."""

import os
import threading
import time


def end_when_orphaned(parent: int) -> None:
    """Starts a thread that ends this process when the process `parent`, which started it, has ended."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
