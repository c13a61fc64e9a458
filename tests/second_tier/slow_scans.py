"""The helper's process where a scan takes minutes."""

import time
from unittest.mock import patch

from simple_offload.second_tier import helper_main
from simple_offload.second_tier.directory import Directory

if __name__ == "__main__":
    with patch.object(Directory, "scan", lambda _: time.sleep(600)):
        helper_main.main()
