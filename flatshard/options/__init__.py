"""What users choose, validated once."""
