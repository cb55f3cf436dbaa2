# SPDX-License-Identifier: Apache-2.0
"""The namespace of the ops in torch.ops. A build for the Hugging Face Hub replaces this file: see
python/hub.py."""
NAMESPACE = "rafter"
