"""The settings of `gradrule serve`: from flags, the environment, a TOML file and presets."""

from gradrule_server.settings.groups import default_data_dir
from gradrule_server.settings.model import GROUPS, Settings
from gradrule_server.settings.sources import (
    CLIENT_VARIABLES,
    PRESETS,
    SOURCE_NAMES,
    SettingsError,
    environment_name,
    file_key,
    flag_name,
    kubernetes_service_variables,
)

__all__ = [
    "CLIENT_VARIABLES",
    "GROUPS",
    "PRESETS",
    "SOURCE_NAMES",
    "Settings",
    "SettingsError",
    "default_data_dir",
    "environment_name",
    "file_key",
    "flag_name",
    "kubernetes_service_variables",
]
