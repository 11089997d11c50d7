"""What every rewrite needs: contracts, edits, matching, passes."""
